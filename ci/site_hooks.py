"""Hooks of MkDocs: linked repository files become pages of the site; pages show the version and link to their source.

Pages are written for a code-hosting site, where `../benchmarks/RESULTS.md` is a file. MkDocs reads only the folder
`docs`. The hooks therefore follow links from page to page: Markdown becomes a page, an image is copied, and other text
becomes a page with a code block. The links are rewritten accordingly.
"""

import posixpath
import re
import subprocess
from pathlib import Path

from markdown import Extension
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
"""A link to a file, in three groups: the text before its path, the path, and its anchor."""
PICTURE = re.compile(r'<picture>\s*<source [^>]*dark[^>]*srcset="([^"]+)">\s*(<img src="([^"]+)"[^>]*>)\s*</picture>')
"""A picture for each color scheme, in three groups: the dark file, the image element, and the light file."""
REMOTE = re.compile(r"(?:https://(?:[^@/]+@)?|(?:ssh://)?git@)([\w.-]+)[:/](.+?)(?:\.git)?/?")
"""Address of a remote repository, in two groups: the host and the path."""
NAMED = {
    "benchmarks/RESULTS.md": "results/README.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files outside `docs` that are in the navigation, and their pages."""

LEXERS = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml"}
SHOWN = {".png", ".svg", ".html", ".npz"}
"""Suffixes of files displayed or downloaded by a browser."""


class TwoSpaces(Extension):
    """Extension accepting list continuations indented by two spaces, as on code-hosting sites, instead of four."""

    def extendMarkdown(self, md):
        """Set the indentation width of lists."""
        md.tab_length = 2


def version() -> str:
    """Return the version of the package without importing it."""
    return re.search(r'__version__ = "(.+?)"', (ROOT / "jax_moe_lb/__init__.py").read_text()).group(1)


def repository() -> str | None:
    """Return the web address of the repository this checkout was cloned from; `None` for a local clone."""
    done = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True)
    found = REMOTE.fullmatch(done.stdout.strip())
    return f"https://{found[1]}/{found[2]}" if found else None


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the version and the repository to the header, and all pages of `docs/systems` to the navigation."""
    config.site_name = f"{config.site_name} {version()}"
    config.copyright = f"jax_moe_lb {version()} · Apache-2.0"
    if address := repository():
        config.repo_url, config.repo_name = address, address.split("/", 3)[3]
    config.markdown_extensions.append(TwoSpaces())
    explanation = next(section["Explanation"] for section in config.nav if "Explanation" in section)
    systems = next(entry for entry in explanation if "Systems" in entry)
    systems["Systems"] = [f"systems/{page.name}" for page in sorted((ROOT / "docs/systems").glob("*.md"))]
    return config


def place(origin: str) -> str:
    """Return the path of a repository file on the site, as an MkDocs source path."""
    if origin.startswith("docs/"):
        return origin.removeprefix("docs/")
    if origin in NAMED:
        return NAMED[origin]
    suffix = "" if Path(origin).suffix in SHOWN | {".md"} else ".md"
    return f"source/{origin}{suffix}"


def targets(origin: str, text: str) -> set[str]:
    """Return the repository files linked by a page."""
    here = posixpath.dirname(origin)
    found = {posixpath.normpath(posixpath.join(here, link)) for _, link, _ in LINK.findall(text)}
    return {target for target in found if not target.startswith("..") and (ROOT / target).is_file()}


def shown(origin: str) -> str | bytes:
    """Return the site content of a file: Markdown and images unchanged, other text in a code block."""
    path = ROOT / origin
    if path.suffix in SHOWN:
        return path.read_bytes()
    if path.suffix == ".md":
        return path.read_text()
    return f"# `{origin}`\n\n````{LEXERS.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all repository files linked by pages, recursively."""
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
    """Rewrite links to repository files into links to their pages; link to the source of the page."""
    here = page.file.src_uri
    origin = config.extra["origins"].get(here)
    page.edit_url = f"{config.repo_url}/edit/main/{origin}" if config.repo_url and origin else None
    if here == "index.md":  # the only page of its tab
        page.meta["hide"] = ["navigation"]
    if origin is None or not origin.endswith(".md"):
        return markdown

    def led(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link[2]))
        if target.startswith("..") or not (ROOT / target).is_file():
            return link[0]
        return f"{link[1]}{posixpath.relpath(place(target), posixpath.dirname(here) or '.')}{anchor(target, link[3])}"

    # HTML comments contain sources of numbers and would break the tables around them.
    return PICTURE.sub(by_scheme, LINK.sub(led, re.sub("<!--.*?-->", "", markdown, flags=re.DOTALL)))


def by_scheme(picture: re.Match) -> str:
    """Return one image per color scheme of the site, as `<picture>` follows the browser and not the site's switch."""
    dark, image, light = picture.groups()
    one_each = (image.replace(light, f"{path}#only-{name}") for name, path in (("light", light), ("dark", dark)))
    return f"<p>{''.join(one_each)}</p>"


def anchor(target: str, end: str) -> str:
    """Return the anchor of a duplicate heading in MkDocs form, `name_1`, instead of `name-1` of code-hosting sites."""
    again = re.fullmatch(r"#(.+)-(\d+)\)", end)
    if not again or not target.endswith(".md"):
        return end
    headings = re.findall(r"^#+ (.+)$", (ROOT / target).read_text(), re.MULTILINE)
    slugs = {slugify(case="lower")(heading, "-") for heading in headings}
    return end if end[1:-1] in slugs or again[1] not in slugs else f"#{again[1]}_{again[2]})"
