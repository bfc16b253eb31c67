import jax
import pytest

from tests.parity.references import make_reference

# Most of what is compiled for one release of transformers is compiled for the next one, too.
jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Makes the reference of an architecture once."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = make_reference(name, tmp_path_factory.mktemp(name))
        return made[name]

    return of
