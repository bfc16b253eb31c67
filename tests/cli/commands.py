"""Commands run in the process of a test."""

from jax_moe_lb.cli import main


def output(capsys, *argv):
    """Return the printed text of a command that succeeds without messages."""
    assert main([str(argument) for argument in argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys, *argv):
    """Return the message of a command that fails in one line."""
    assert main([str(argument) for argument in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err
