"""The pages of the site: the repository's own Markdown files, at their own paths.

mkdocs reads one folder, and READMEs lie beside what they describe. This hook adds all of them, so
there is one source of each page, every relative link works on the site as it does in the
repository, and mkdocs checks it. A linked file that is not a page (code, a table, a notebook)
becomes one that shows it, under its path and `.md`; the search leaves out all but notebooks."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

FOLDERS = ("components", "configs", "containers", "docs", "notebooks", "rekindle", "tests")
PICTURES = {".svg", ".png"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
_FENCE = "`" * 4
_APART = "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the files that they link to."""
    root = Path(config.config_file_path).parent
    pages = [
        *root.glob("*.md"),
        *(page for name in FOLDERS for page in (root / name).rglob("*.md")),
    ]
    linked: set[str] = set()
    for path in pages:
        source = path.relative_to(root).as_posix()
        files.append(File.generated(config, source, abs_src_path=str(path)))
        linked |= set(_linked(source, path.read_text(encoding="utf-8"), root))
    for name in sorted(linked):
        if Path(name).suffix in PICTURES:
            files.append(File.generated(config, name, abs_src_path=str(root / name)))
        else:
            page = File.generated(config, f"{name}.md", content=shown(root / name, name))
            if not name.endswith(".ipynb"):
                page.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files lead to the pages that show them; hide an empty table of contents."""
    if "\n## " not in markdown:
        page.meta.setdefault("hide", ["toc"])
    here = posixpath.dirname(page.file.src_uri)

    def there(match: re.Match[str]) -> str:
        name = posixpath.normpath(posixpath.join(here, match[1]))
        return f"{match[1]}.md" if files.get_file_from_path(f"{name}.md") else match[1]

    return _LINK.sub(there, markdown)


def shown(path: Path, name: str) -> str:
    """The Markdown of a page that shows a file of the repository."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n\n".join(_cells(json.loads(text)))
    language = LANGUAGES.get(path.suffix, "")
    return f"{_APART}# {name}\n\n{_FENCE}{language}\n{text.rstrip()}\n{_FENCE}\n"


def _cells(notebook: dict[str, list[dict[str, object]]]) -> Iterator[str]:
    for cell in notebook["cells"]:
        source = cell["source"]
        text = "".join(source) if isinstance(source, list) else str(source)
        yield text if cell["cell_type"] == "markdown" else f"{_FENCE}python\n{text}\n{_FENCE}"


def _linked(source: str, text: str, root: Path) -> Iterator[str]:
    """Files that a page links to and that are not pages themselves."""
    for target in _LINK.findall(text):
        name = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if "://" not in target and not name.endswith(".md") and (root / name).is_file():
            yield name
