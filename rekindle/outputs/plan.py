"""What `rekindle plan` says."""

from collections.abc import Mapping

from rekindle.outputs.errors import ErrorRow
from rekindle.records import Record, VersionedRecord


class PlannedTerm(Record):
    """A part of memory (bytes) or time (seconds a step)."""

    name: str
    amount: float


class PlannedLayout(Record):
    """Machines and a layout."""

    machine: str
    nodes: int
    gpus_per_node: int
    gpu: str
    region: str
    layout: str
    degrees: Mapping[str, int]
    schedule: str
    micro_batch_size: int
    accumulation: int
    activation_checkpointing: str
    precision: str = ""
    step_seconds: tuple[float, float, float]
    """Of an optimizer step: least, expected, most; nine of ten lie within."""
    tokens_per_second: float
    mfu: float
    dominant: str
    memory_bytes: int
    """Of tensors on the fullest GPU."""
    needed_bytes: int
    """The same with the allocator's reserve."""
    device_bytes: int
    """What there are."""
    on_demand_usd_per_hour: float | None
    spot_usd_per_hour: float | None
    zero: str = ""
    """What DeepSpeed divides, where it trains."""


class PlannedSpot(Record):
    """Training on spot machines.

    Pairs are for machines that are reclaimed all at once, and one by one."""

    viable: str
    hazard_per_node_hour: float
    hazard: str
    every: int
    """Steps between two checkpoints."""
    hours: tuple[float, float]
    usd: tuple[float, float]
    interruptions: tuple[float, float]
    in_time: tuple[float | None, float | None]
    in_budget: tuple[float | None, float | None]
    slack_hours: float | None = None
    """With a deadline: on-demand machines have to take over once training is so far
    behind what it is without interruptions."""
    fallback: tuple[float, float] | None = None
    """The chance of that."""
    fallback_usd: tuple[float, float] | None = None
    """The expected cost of both kinds together."""
    reasons: tuple[str, ...]


class Rejection(Record):
    """A layout that was not taken, and why."""

    layout: str
    reason: str


class PlannedRest(Record):
    """The steps besides training, as long as they took in an earlier run."""

    hours: float
    usd: float | None
    """None where the price of one of their machines is not known."""
    run_id: str
    """The earlier run."""
    divided: int = 0
    """Machines of `ingest` and `shard`, had that run another number; 0: the same."""


class Planned(VersionedRecord):
    """`plan`: what training needs, how long it takes and what it costs."""

    name: str
    parameters: int
    tokens_per_step: int
    steps: int | None
    """None where their number depends on data."""
    chosen: PlannedLayout
    memory: tuple[PlannedTerm, ...]
    time: tuple[PlannedTerm, ...]
    hours: tuple[float, float, float] | None
    """Least, expected, most; None where the number of steps depends on data."""
    on_demand_usd: tuple[float, float, float] | None
    spot: PlannedSpot | None
    rest: PlannedRest | None = None
    """What is in none of the others; None where no earlier run is known."""
    others: tuple[PlannedLayout, ...]
    rejected: tuple[Rejection, ...]
    weighed: int
    """How many layouts were weighed."""
    advice: tuple[str, ...] = ()
    """Why this engine and layout, and what the other engine would do."""
    if_else: tuple[str, ...]
    """What other machines or data would change."""
    notes: tuple[str, ...]
    """What is assumed or not known."""
    errors: tuple[ErrorRow, ...] = ()


class Calibration(VersionedRecord):
    """`plan --calibrate`: a measured training, kept as `speeds/RUN.json`."""

    run_id: str
    gpu: str
    compiled: bool
    layout: str
    measured: float
    """Seconds of a step: the median."""
    predicted: float
    """Seconds of a step by the numbers called `constants`, uncorrected."""
    ratio: float
    """Measured over predicted."""
    steps: int
    """How many were measured."""
    left_out: int
    """How many of the first were not."""
    job: str
    """Names the work and the machines."""
    constants: str
    sequence: int = 0
    """Tokens of an example; 0: not known."""
    engine: str = "rekindle"
