import jax
import pytest

from tests.models.small import CONFIG, run


@pytest.fixture(scope="package", autouse=True)
def all_devices():
    """Before a command line asks for fewer of them."""
    assert jax.device_count() == 8


@pytest.fixture(scope="package")
def trained_run(tmp_path_factory, all_devices):
    """The folder of a finished run; not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "trained"
    run(CONFIG, folder)
    return folder
