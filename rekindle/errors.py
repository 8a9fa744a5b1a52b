"""What can go wrong, as one tree; every error says what, where and what to do.

    RekindleError                 exit 1: it was tried and failed
    ├── RequestError              exit 2: the request is wrong; nothing was sent or written
    │   ├── SpecError             the YAML, an override, a cross-check: all problems at once
    │   └── UnsupportedError      a feature that is refused, with its place in the IR
    ├── DataError                 the source or a shard is not what it should be, with the rows
    ├── StepError                 a step of the pipeline failed
    │   └── RolledBackError       a version that was deployed had to be rolled back
    ├── CheckpointError           no usable checkpoint where one was promised
    ├── StorageError              a folder or an object store of rekindle's files cannot be used
    │   └── ExistsError           (in storage/) another process wrote what was to be new
    ├── RegistryError             the model registry refused, or holds something else than expected
    │   └── ChangedModelError     the files of a version are not those that were registered
    ├── PlatformError             a platform refused what was sent
    │   └── UnreachableError      it did not answer, and may do so later
    ├── PreemptedError            exit 75: stopped from outside after a save; the same command
    │                             resumes
    └── InterruptedRunError       exit 130: Ctrl-C; the same command resumes

`str(error)` is the text a person reads in a terminal or at the end of a log;
`error_in_log` (launch/events.py) reads it back. Secrets are masked in all texts of a problem,
because a service may quote in its error what it was sent."""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rekindle.masking import masked, plain


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `what` happened, `where` (file:line, row, IR path), and a `fix`."""

    what: str
    where: str = ""
    fix: str = ""
    code: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A question that suggests the most similar of the `known` names; "" where none is similar."""
    import difflib  # here, so that a command that succeeds does not import it

    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean `{near[0]}`?" if near else ""


def first_line(error: BaseException, text: object = None) -> str:
    """The first line of `text`, by default of the error's own; the name of the error's type
    where the text is empty."""
    lines = str(text or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def fix_of(error: OSError) -> str:
    """What to do about a file that cannot be read or written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = Path(str(error.filename or ".")).absolute()
        existing = next((p for p in (folder, *folder.parents) if p.exists()), folder)
        with contextlib.suppress(OSError):
            if not os.statvfs(existing).f_favail:  # ENOSPC also stands for this
                return "delete files: the file system has no inodes left"
        return "free some space"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "correct the permissions"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of a file (ulimit -f)"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit on open files (ulimit -n)"
    return "check the path"


def _shown(text: str) -> str:
    """The text as a person may see it: without secrets, and without codes that would steer a
    terminal."""
    return plain(masked(text))


class RekindleError(Exception):
    """Base of every error rekindle raises on purpose; carries one `Problem` or several."""

    code = "E-FAILED"
    exit_code = 1

    def __init__(self, what: str | Iterable[Problem], *, where: str = "", fix: str = "") -> None:
        problems = [Problem(what, where, fix)] if isinstance(what, str) else what
        self.problems = tuple(self._as_shown(problem) for problem in problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def _as_shown(self, problem: Problem) -> Problem:
        """The problem as a person may see it, with this error's code if it has none."""
        return Problem(
            what=_shown(problem.what),
            where=_shown(problem.where),
            fix=_shown(problem.fix),
            code=problem.code or self.code,
        )

    def __reduce__(self) -> tuple[type["RekindleError"], tuple[tuple[Problem, ...]]]:
        # pickle would keep only the text, and an error travels from rank to rank with its problems
        return type(self), (self.problems,)


class RequestError(RekindleError):
    code = "E-REQUEST"
    exit_code = 2


class SpecError(RequestError):
    code = "E-SPEC"


@contextlib.contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a RequestError to `problems` instead of raising it."""
    try:
        yield
    except RequestError as error:
        problems += error.problems


class UnsupportedError(RequestError):
    code = "E-UNSUPPORTED"


class DataError(RekindleError):
    code = "E-DATA"


class StepError(RekindleError):
    code = "E-STEP"


class RolledBackError(StepError):
    code = "E-ROLLED-BACK"


class CheckpointError(RekindleError):
    code = "E-CHECKPOINT"


class StorageError(RekindleError):
    code = "E-STORAGE"


class RegistryError(RekindleError):
    code = "E-REGISTRY"


class ChangedModelError(RegistryError):
    pass


class PlatformError(RekindleError):
    code = "E-PLATFORM"


class UnreachableError(PlatformError):
    code = "E-UNREACHABLE"


class PreemptedError(RekindleError):
    code = "E-PREEMPTED"
    exit_code = 75


class InterruptedRunError(RekindleError):
    code = "E-INTERRUPTED"
    exit_code = 130
