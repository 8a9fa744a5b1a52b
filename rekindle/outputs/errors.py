"""What any verb says that was refused or failed."""

import dataclasses

from rekindle.errors import RekindleError
from rekindle.records import Record, VersionedRecord


class ErrorRow(Record):
    """A problem."""

    code: str
    what: str
    """What is wrong."""
    where: str = ""
    """A field with its line, a flag, or a step."""
    fix: str = ""
    """What to do."""


def rows_of(error: RekindleError) -> tuple[ErrorRow, ...]:
    """A row a problem."""
    return tuple(ErrorRow(**dataclasses.asdict(problem)) for problem in error.problems)


class Errors(VersionedRecord):
    """Any verb that was refused or failed (exit codes 1 and 2)."""

    errors: tuple[ErrorRow, ...]
