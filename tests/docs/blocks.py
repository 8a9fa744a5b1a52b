"""Fenced code blocks of the READMEs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block; `file` is the name in its first line (`# train.py`), if it has one."""

    readme: Path
    number: int
    kind: str
    text: str

    @property
    def file(self) -> str:
        found = _FILE.match(self.text)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.readme.relative_to(ROOT)}#{self.number}"


def pages() -> list[Path]:
    """Every Markdown file of the repository."""
    folders = [
        path
        for path in ROOT.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in ("build", "dist")
    ]
    return sorted([*ROOT.glob("*.md"), *(page for f in folders for page in f.rglob("*.md"))])


def blocks(kind: str = "") -> list[Block]:
    """The blocks of that kind, or all."""
    found = [
        Block(page, number, *match.groups())
        for page in pages()
        for number, match in enumerate(_FENCE.finditer(page.read_text(encoding="utf-8")), 1)
    ]
    return [block for block in found if kind in ("", block.kind)]


def lay_out(readme: Path, folder: Path) -> None:
    """Write the Python files that the blocks of a README name."""
    for block in blocks("python"):
        if block.readme == readme and block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")


def commands(block: Block) -> list[str]:
    """The lines of a bash block without their comments."""
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in block.text.splitlines()]
    return [line for line in lines if line]
