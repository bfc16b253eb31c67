"""The documented limits are those of the code, and the legal files are complete and shipped."""

import ast
import dataclasses
import re
import tomllib
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from ci.check_archives import LEGAL, NEEDED, check
from jax_moe_lb.core import FileLimits

ROOT = Path(__file__).parents[1]
PICKLES = re.compile(
    r"\b(pickle\.(load|loads|Unpickler)|torch\.load|allow_pickle=True|yaml\.(load|unsafe_load|full_load))\b"
)


def test_the_page_has_the_limits_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert {name: int(value) for name, value in rows} == dataclasses.asdict(FileLimits())


@pytest.mark.slow
def test_no_reader_executes_a_file():
    for path in [*(ROOT / "jax_moe_lb").rglob("*.py"), *(ROOT / "models").rglob("*.py")]:
        code = ast.unparse(ast.parse(path.read_text()))
        assert not PICKLES.search(code), path
        assert not re.search(r"^(from|import) pickle\b", code, re.MULTILINE), path


def test_notice_names_files_of_the_tree():
    notice = (ROOT / "NOTICE").read_text()
    paths = re.findall(r"\b(?:jax_moe_lb|ffi)/[\w/]+\.(?:py|\*)", notice)
    assert len(paths) == 9
    for path in paths:
        assert list(ROOT.glob(path)), path
    for name in ("EPLB", "LPLB", "UltraEP"):
        assert f"\n{name} (" in notice
    assert notice.count("Permission is hereby granted") == 1


def test_archives_contain_the_legal_files():
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert shipped == ["LICENSE", "NOTICE", "SECURITY.md"]
    assert all(set(shipped) <= set(needed) for needed in NEEDED.values())
    assert all((ROOT / name).is_file() for name in shipped)


@pytest.mark.parametrize("missing", [None, "NOTICE"])
def test_the_check_of_archives_requires_them(tmp_path, missing):
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in NEEDED[".whl"]:
            folder = "x-0.dist-info/licenses/" if name in LEGAL else ""
            wheel.writestr(f"{folder}{name}", "") if name != missing else None
    with pytest.raises(SystemExit, match="missing \\['NOTICE'\\]") if missing else nullcontext():
        check(path)
