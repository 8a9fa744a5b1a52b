"""Which of rekindle's own code identifies a training."""

import ast
from pathlib import Path

import rekindle
from rekindle.spec.identity import TRAINING

PACKAGE = Path(rekindle.__file__).parent
# what they say, show, count or choose, but not what is computed
ASIDE = {"catalog", "formats", "masking", "plan"}


def sources():
    for part in TRAINING:
        path = PACKAGE / part
        yield from [path] if path.suffix == ".py" else path.rglob("*.py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rekindle"):
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from names


def test_changed_code_that_trains_does_not_get_an_old_result():
    known = {part.removesuffix(".py") for part in TRAINING} | ASIDE
    found = {name: path for path in sources() for name in imported(path)}
    assert not {name: str(path) for name, path in found.items() if name not in known}
