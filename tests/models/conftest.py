import jax
import pytest

from tests.models.small import CONFIG, run


@pytest.fixture(scope="package", autouse=True)
def all_devices():
    """Before a command line asks for fewer of them."""
    assert jax.device_count() == 8


def pytest_collection_modifyitems(items):
    """What looks at the trained run goes to one worker, which trains it once."""
    for item in items:
        if "trained_run" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("trained run"))


@pytest.fixture(scope="package")
def trained_run(tmp_path_factory, all_devices):
    """The folder of a finished run; not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    run(CONFIG, folder)
    return folder
