"""The measured numbers of the time model: which set goes with a GPU and a software, and
how far off its predictions were on rows that it was not fitted to. The rows are in
constants.yaml."""

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
class Calibrated:
    """Constants, the half-width of the interval around what is predicted with them
    (`spread`, a share: nine of ten rows lay within it, or it is `guessed`), and what they
    stand on. `factor` is what a measured training took, over what they predicted."""

    constants: Constants
    spread: float
    basis: str
    factor: float = 1.0
    guessed: bool = False

    def __str__(self) -> str:
        interval = f"within {self.spread:.0%}" if self.spread < 1 else "half to twice as long"
        certainty = ", a guess" if self.guessed else " in nine of ten"
        return f"{self.basis}; {interval}{certainty}"


@functools.cache
def stamp() -> str:
    """Names these numbers and the formulas that they are for: a measured run says by how
    much their predictions were off, which says nothing of those of others."""
    digest = hashlib.sha256()
    for path in (FILE, FILE.with_name("steptime.py"), FILE.with_name("attention.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def spread_of(kind: str) -> float:
    """The half-width, a share, of times that were corrected by a measured training: of
    the same work on the same machines (`same_job`), or of another on the same GPU
    (`calibrated`)."""
    return float(rows(FILE)["spread"][kind])


def profile_of(gpu: str, compiled: bool = False, engine: str = "rekindle") -> Calibrated:
    """The profile of a GPU of the catalog; one that was not measured borrows that of the
    most similar one, and is less sure."""
    table = rows(FILE)
    measured_gpu = table["measured_as"].get(gpu)
    if measured_gpu is not None:
        like = measured_gpu
        spread = table["spread"]["measured"]
        basis = table["fitted_on"]
    else:
        borrows_from = table["borrows_from"]
        like = borrows_from.get(gpu, borrows_from["others"])
        spread = table["spread"]["borrowed"]
        basis = f"measured on {like}, not on {gpu}"
    # `|` copies: rows of the table are shared by all callers
    numbers = table["software"] | table["gpus"][like]
    if compiled:
        for name, factor in table["compiled"]["times"].items():
            numbers[name] *= factor
    numbers["kernels"] = {name: Kernel(**row) for name, row in table["kernels"][like].items()}
    if gpu == CPU:
        spread = table["spread"]["cpu"]
        basis = "not measured on this CPU"
    if compiled:
        spread = max(spread, table["spread"]["compiled"])
        basis = f"{basis}; {table['compiled']['basis']}"
    other_engine = engine != "rekindle"
    if other_engine:
        spread = max(spread, table["spread"]["other_engine"])
        basis = f"{basis}; not measured with {engine}"
    guessed = other_engine or measured_gpu is None
    return Calibrated(Constants(**numbers), spread, basis, guessed=guessed)
