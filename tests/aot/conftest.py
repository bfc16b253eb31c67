import pytest

from tests.aot.programs import exchanging_program


@pytest.fixture(scope="session")
def exchanging(tmp_path_factory):
    return exchanging_program(tmp_path_factory.mktemp("exchanging"))
