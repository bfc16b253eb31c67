import jax
import pytest

from tests.parity.references import make_reference

# Most programs are equal for two releases of transformers, so share the compilation cache.
jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture(scope="module", autouse=True)
def cpu_branches_alone(cpu_branches):
    """No test here lowers for another platform."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Return a function building the reference of an architecture once."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = make_reference(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of
