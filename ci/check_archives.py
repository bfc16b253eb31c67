"""Check the files of an sdist and a wheel: check_archives.py FILES."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

PARTS = ("__init__.py", "__init__.pyi", "py.typed", "_ffi.", "_planning.")
LEGAL = ("LICENSE", "NOTICE", "SECURITY.md")
NEEDED = {
    ".whl": (*(f"jax_moe_lb/{name}" for name in PARTS), *LEGAL),
    ".gz": ("CMakeLists.txt", *LEGAL, "README.md", "ffi/ffi_module.cc", "jax_moe_lb/__init__.py", "pyproject.toml"),
}
REFUSED = {"BUILD", "WORKSPACE", "MODULE.bazel", "mkdocs.yml"}
REFUSED |= {"tests", "models", "benchmarks", "examples", "ci", "third_party"}


def names(archive: Path) -> list[str]:
    """Return the files of an archive, without the top directory of an sdist or of the licenses of a wheel."""
    if archive.suffix == ".whl":
        return [re.sub(r"^[^/]+\.dist-info/licenses/", "", name) for name in zipfile.ZipFile(archive).namelist()]
    return [name.partition("/")[2] for name in tarfile.open(archive).getnames()]


def check(archive: Path) -> None:
    """Exit with an error if a file is missing or unexpected."""
    held = names(archive)
    missing = [needed for needed in NEEDED[archive.suffix] if not any(name.startswith(needed) for name in held)]
    too_many = [name for name in held if REFUSED & set(name.split("/"))]
    if missing or too_many:
        sys.exit(f"{archive.name}: missing {missing}, too many {too_many}")
    print(f"{archive.name}: {len(held)} files, {archive.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"expected an sdist and a wheel, not {sys.argv[1:]}")
    for argument in sys.argv[1:]:
        check(Path(argument))
