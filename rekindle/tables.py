"""Tables that are kept as YAML beside the module that reads them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rekindle.errors import Problem


@functools.cache
def rows(path: Path) -> Any:
    """What a YAML file of ours holds, read once, by PyYAML's parser in C where there is one."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506 - a safe one


def problems_in(module: str) -> Callable[..., Problem]:
    """A maker of problems in the words of `problems.yaml` beside a module, under the
    module's name: `what`, `where` and `fix`, as far as the caller does not give them,
    with the braces filled in from what else it gives."""
    path = Path(module)

    def problem(name: str, /, what: str = "", where: str = "", **about: Any) -> Problem:
        row = rows(path.with_name("problems.yaml"))[path.stem][name]
        known = {key: text.format(**about) for key, text in row.items()}
        return Problem(**{"what": what, "where": where, **known})

    return problem
