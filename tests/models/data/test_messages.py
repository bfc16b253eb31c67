"""Conversations of a file as prompts of `models.generate`, and variables of the template."""

import json
import warnings

import pytest
from typer.testing import CliRunner

from models import generate
from models.tiny_checkpoint import byte_tokenizer, write_tiny
from tests.models.small import refusal

TEMPLATE = """{% if tools %}tools {{ tools | length }}; {% endif %}
{%- for message in messages %}{{ message.role[0] }}:{{ message.content }} {% endfor %}
{%- if add_generation_prompt %}a:{{ '-' if enable_thinking is false }}{{ mood }}{% endif %}"""
TALK = [
    {"role": "system", "content": "terse"},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "why?"},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    write_tiny("mixtral", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def asked(monkeypatch):
    """Return the prompts with which a model would be called."""
    prompts = []

    def record(tokens, *_, **__):
        prompts.extend(byte_tokenizer().decode(line) for line in tokens)
        return [[] for _ in tokens]

    monkeypatch.setattr(generate, "Generator", lambda _: record)
    monkeypatch.setattr(generate, "from_pretrained", lambda *_, **__: None)
    return prompts


@pytest.mark.parametrize(
    ("content", "options", "wanted"),
    [
        ({"messages": TALK}, [], "s:terse u:1+1? a:2 u:why? a:"),
        (TALK, [], "s:terse u:1+1? a:2 u:why? a:"),
        ({"messages": TALK[1:2], "tools": [{"name": "add"}]}, [], "tools 1; u:1+1? a:"),
        (TALK[1:2], ["enable_thinking=false", "mood=[calm]"], "u:1+1? a:-[calm]"),
        ({"messages": TALK[1:2], "chat_template_kwargs": {"enable_thinking": False, "mood": 1}}, [], "u:1+1? a:-1"),
        ({"messages": TALK[1:2], "chat_template_kwargs": {"mood": 1}}, ["mood=2"], "u:1+1? a:2"),
    ],
)
def test_a_file_has_the_conversation(checkpoint, tmp_path, asked, content, options, wanted):
    (tmp_path / "talk.json").write_text(json.dumps(content))
    settings = [part for option in options for part in ("--template-set", option)]
    arguments = ["--checkpoint", str(checkpoint), "--messages", str(tmp_path / "talk.json"), *settings]
    result = CliRunner().invoke(generate.app, arguments)
    assert result.exit_code == 0, result.output
    assert asked == [wanted]


def test_questions_have_variables_of_the_template(checkpoint, asked):
    options = ["--chat", "--prompt", "a", "--prompt", "b", "--template-set", "mood=!"]
    assert CliRunner().invoke(generate.app, ["--checkpoint", str(checkpoint), *options]).exit_code == 0
    assert asked == ["u:a a:!", "u:b a:!"]


def test_a_warning_is_a_line(checkpoint, asked, monkeypatch):
    def warning(tokens, *_, **__):
        warnings.warn("sequences are long", stacklevel=2)
        return [[]]

    monkeypatch.setattr(generate, "Generator", lambda _: warning)
    result = CliRunner().invoke(generate.app, ["--checkpoint", str(checkpoint), "--prompt", "a"])
    assert result.stderr == "warning: sequences are long\n"


VARIABLE = "--template-set"


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (None, ["--messages", "talk.json"], "messages is 'talk.json'; expected a readable file: No such file"),
        ("{", ["--messages", "talk.json"], "messages is 'talk.json'; expected JSON"),
        ("{}", ["--messages", "talk.json"], "messages is 'talk.json'; expected an object with messages, or a list"),
        ("3", ["--messages", "talk.json"], "messages is 3; expected a list of objects"),
        ("[1]", ["--messages", "talk.json"], "messages has 1; expected an object with a role"),
        ("[]", [], "prompt is None and messages is None; expected one of them"),
        ("[]", ["--prompt", "a", "--messages", "talk.json"], "messages is talk.json; expected one of them"),
        ("[]", ["--prompt", "a", VARIABLE, "mood=1"], "template_set is 'mood=1'; expected --chat or --messages"),
        ("[]", ["--prompt", "a", "--chat", VARIABLE, "mood"], "template_set is 'mood'; expected NAME=VALUE"),
        ("[]", ["--prompt", "a", "--chat", VARIABLE, "messages=1"], "has 'messages'; expected variables besides"),
    ],
)
@pytest.mark.usefixtures("asked")
def test_bad_conversations_are_refused_in_one_line(checkpoint, tmp_path, monkeypatch, content, options, expected):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "talk.json").write_text(content)
    assert expected in refusal(generate.app, "--checkpoint", checkpoint, *options)
