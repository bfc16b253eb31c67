"""Hooks of MkDocs: files of the repository that pages link to become pages of the site, and the version stands on all.

Pages are written for a code-hosting site, where `../benchmarks/RESULTS.md` is a file beside them. MkDocs knows the
folder `docs` alone. So what pages link to is found here, from page to page: Markdown becomes a page, an image is
copied, and other text is a page that shows it. The links then lead there.
"""

import posixpath
import re
from pathlib import Path

from markdown import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
"""A link to a file: what is before its path, the path, and its anchor."""
NAMED = {
    "benchmarks/RESULTS.md": "results/README.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files beside `docs` that are in the navigation, and their pages."""

LEXERS = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml"}
SHOWN = {".png", ".svg", ".html", ".npz"}
"""What a browser shows or stores by itself."""


class TwoSpaces(Extension):
    """Lists go on after two spaces, as code-hosting sites read them, and not after four."""

    def extendMarkdown(self, md):
        """Set how far a list is indented."""
        md.tab_length = 2


def version() -> str:
    """Read the version off the package without importing it."""
    return re.search(r'__version__ = "(.+?)"', (ROOT / "jax_moe_lb/__init__.py").read_text()).group(1)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the version below every page, and every page of `docs/systems` into the navigation."""
    config.copyright = f"jax_moe_lb {version()} · Apache-2.0"
    config.markdown_extensions.append(TwoSpaces())
    explanation = next(section["Explanation"] for section in config.nav if "Explanation" in section)
    systems = next(entry for entry in explanation if "Systems" in entry)
    systems["Systems"] = [f"systems/{page.name}" for page in sorted((ROOT / "docs/systems").glob("*.md"))]
    return config


def place(origin: str) -> str:
    """Return where on the site a file of the repository is, as MkDocs names sources."""
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    if origin in NAMED:
        return NAMED[origin]
    suffix = "" if Path(origin).suffix in SHOWN | {".md"} else ".md"
    return f"source/{origin}{suffix}"


def targets(origin: str, text: str) -> set[str]:
    """Find the files of the repository that a page links to."""
    here = posixpath.dirname(origin)
    found = {posixpath.normpath(posixpath.join(here, link)) for _, link, _ in LINK.findall(text)}
    return {target for target in found if not target.startswith("..") and (ROOT / target).is_file()}


def shown(origin: str) -> str | bytes:
    """Return what the site has of a file: Markdown and pictures as they are, other text in a block of code."""
    path = ROOT / origin
    if path.suffix in SHOWN:
        return path.read_bytes()
    if path.suffix == ".md":
        return path.read_text()
    return f"# `{origin}`\n\n````{LEXERS.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, from page to page."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + list(NAMED)
    seen = set(waiting)
    while waiting:
        origin = waiting.pop()
        if not origin.startswith("docs/"):
            listed = InclusionLevel.INCLUDED if origin in NAMED else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place(origin), content=shown(origin), inclusion=listed))
        if origin.endswith(".md"):
            more = targets(origin, (ROOT / origin).read_text()) - seen
            seen |= more
            waiting += more
    config.extra["origins"] = {place(origin): origin for origin in seen}
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri
    origin = config.extra["origins"].get(here)
    if origin is None or not origin.endswith(".md"):
        return markdown

    def led(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link[2]))
        if target.startswith("..") or not (ROOT / target).is_file():
            return link[0]
        return f"{link[1]}{posixpath.relpath(place(target), posixpath.dirname(here) or '.')}{anchor(target, link[3])}"

    # Comments say where a number comes from, and would break the tables that they stand in.
    return LINK.sub(led, re.sub("<!--.*?-->", "", markdown, flags=re.DOTALL))


def anchor(target: str, end: str) -> str:
    """Name the second of two equal headings as MkDocs does, `name_1`, where code-hosting sites say `name-1`."""
    again = re.fullmatch(r"#(.+)-(\d+)\)", end)
    if not again or not target.endswith(".md"):
        return end
    headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text(), re.MULTILINE)
    slugs = {slugify(case="lower")(heading, "-") for heading in headings}
    return end if end[1:-1] in slugs or again[1] not in slugs else f"#{again[1]}_{again[2]})"
