"""A check of a config: what it needs, and the problems that it finds."""

import abc
import dataclasses
import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from rekindle.errors import Problem
from rekindle.spec.model import Spec


class Need(enum.Enum):
    """What a check reads beside the config and the files that it names."""

    NOTHING = "nothing"
    MACHINE = "this machine"
    DATA = "the data"
    NETWORK = "the network, which takes seconds"


class PreflightCheck(abc.ABC):
    """One thing that may be wrong with a config. It writes nothing."""

    name: ClassVar[str]
    """What `rekindle doctor` calls it."""
    need: ClassVar[Need] = Need.NOTHING

    @abc.abstractmethod
    def problems(self, spec: Spec, home: Path) -> Iterable[Problem]:
        """What would make a run of the config below this home fail, each with its fix."""


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """What one check found."""

    name: str
    problems: tuple[Problem, ...]


def check_all(checks: Iterable[PreflightCheck], spec: Spec, home: Path) -> tuple[CheckResult, ...]:
    """What each check finds, in their order."""
    return tuple(CheckResult(check.name, tuple(check.problems(spec, home))) for check in checks)


def problems_in(results: Iterable[CheckResult]) -> Sequence[Problem]:
    """The problems of all checks, each once: two checks may find the same."""
    problems: dict[Problem, None] = {}
    for result in results:
        problems |= dict.fromkeys(result.problems)
    return [*problems]
