"""The measured numbers of the time model: which set goes with a GPU and a software, and how far off
its predictions were on rows that it was not fitted to. The rows are in constants.yaml."""

import dataclasses
import functools
import hashlib
from pathlib import Path

from rekindle.plan.attention import Kernel
from rekindle.plan.steptime import Constants
from rekindle.tables import rows

FILE = Path(__file__).with_suffix(".yaml")
CPU = "CPU"


@dataclasses.dataclass(frozen=True)
class Profile:
    """Constants, the half-width of the interval around what is predicted with them (`spread`, a
    share: nine of ten rows lay within it, or it is `guessed`), and what they stand on. `factor` is
    what a measured training took, over what they predicted."""

    constants: Constants
    spread: float
    basis: str
    factor: float = 1.0
    guessed: bool = False

    def __str__(self) -> str:
        within = f"within {self.spread:.0%}" if self.spread < 1 else "half to twice as long"
        return f"{self.basis}; {within}{', a guess' if self.guessed else ' in nine of ten'}"


@functools.cache
def stamp() -> str:
    """Names these numbers and the formulas that they are for."""
    formulas = (FILE.with_name(f"{name}.py") for name in ("steptime", "attention"))
    read = b"".join(path.read_bytes() for path in (FILE, *formulas))
    return hashlib.sha256(read).hexdigest()[:12]


def spread_of(kind: str) -> float:
    """Of times that were corrected by a measured training: of the same work on the same machines
    (`same_job`), or of another on the same GPU (`calibrated`)."""
    return float(rows(FILE)["spread"][kind])


def profile_of(gpu: str, compiled: bool = False, engine: str = "rekindle") -> Profile:
    """For a GPU of the catalog; unmeasured it borrows the most similar one's, and is less sure."""
    table = rows(FILE)
    measured = table["measured_as"].get(gpu)
    like = measured or table["borrows_from"].get(gpu) or table["borrows_from"]["others"]
    numbers = table["software"] | table["gpus"][like]
    if compiled:
        times = table["compiled"]["times"]
        numbers |= {name: factor * numbers[name] for name, factor in times.items()}
    numbers["kernels"] = {name: Kernel(**row) for name, row in table["kernels"][like].items()}
    spread = table["spread"]["measured" if measured else "borrowed"]
    basis = table["fitted_on"] if measured else f"measured on {like}, not on {gpu}"
    if gpu == CPU:
        spread = table["spread"]["cpu"]
        basis = "not measured on this CPU"
    if compiled:
        spread = max(spread, table["spread"]["compiled"])
        basis = f"{basis}; {table['compiled']['basis']}"
    other = engine != "rekindle"
    if other:
        spread = max(spread, table["spread"]["other_engine"])
        basis = f"{basis}; not measured with {engine}"
    return Profile(Constants(**numbers), spread, basis, guessed=other or not measured)
