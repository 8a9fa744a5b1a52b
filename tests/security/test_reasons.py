"""What ruff's security rules (S) find is repaired, or its ignore says why it is harmless."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_ignore_of_a_security_rule_has_its_reason():
    found = [
        (path, line)
        for folder in ("rekindle", "components", "pipelines")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"# noqa:[^#]*\bS\d{3}", line)
    ]
    assert len(found) > 10
    assert [
        (path, line) for path, line in found if not re.search(r"noqa: [A-Z0-9, ]+ - \w", line)
    ] == []
    rules = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'select = \[.*"S"', rules)
    for rule in re.findall(r'^    "S\d{3}",(.*)$', rules, re.M):
        assert re.search(r"# \w", rule), "the ignore for all files says why, too"
