"""What the user asked for: the fields of the YAML, their meaning, defaults and bounds.
The one source of defaults.

`Spec` and its sections are frozen. A field stands here only if something implements it.
The field docstrings are the reference: `configs/README.md` and `configs/schema.json` are
generated from them. The sections of platforms are in `platforms.py`, checks that need
more than one field in `checks.py`, reading and overrides in `load.py`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, StringConstraints, WithJsonSchema

from rekindle.objectives import METRICS
from rekindle.records import Record
from rekindle.spec.deploy import DeploySpec, MonitorSpec
from rekindle.spec.installed import publishing_platforms
from rekindle.spec.platforms import PlatformsSpec, recorded_sections
from rekindle.spec.schedule import Duration, ScheduleSpec, TriggersSpec
from rekindle.spec.section import SecretReference, Section
from rekindle.spec.tasks import BUILT_IN_TASKS

BUILTIN_TASKS = tuple(BUILT_IN_TASKS)

if TYPE_CHECKING:
    Metric = str
    PublishingPlatform = str
else:
    Metric = Literal[METRICS]
    PublishingPlatform = Literal[publishing_platforms()]

MOST_HOURS = 10_000
ENTRYPOINT_WORDS = ("data", "model", "checkpoints", "seed", "init")

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?$")]
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Delimiter = Annotated[str, StringConstraints(pattern=r"^(auto|[!#-/:-@\[-`{-~\t])$")]
Encoding = Literal[
    "utf-8",
    "utf-16",
    "utf-16-le",
    "utf-16-be",
    "utf-32",
    "cp1250",
    "cp1251",
    "cp1252",
    "latin-1",
    "iso8859-2",
    "iso8859-15",
    "koi8-r",
    "mac-roman",
    "shift_jis",
    "euc_jp",
    "euc_kr",
    "gb18030",
    "big5",
]
Pixels = Annotated[int, Field(ge=1, le=10_000)]


def _height_and_width(value: object) -> object:
    """A size as YAML has it, a number for both or a list, as a pair; pydantic checks the rest."""
    if type(value) is int:  # a bool is an instance of int, and no size
        return value, value
    if isinstance(value, list):
        return tuple(value)
    return value


ImageSize = Annotated[
    tuple[Pixels, Pixels],
    BeforeValidator(_height_and_width, json_schema_input_type=int | list[int]),
]
Beta = Annotated[float, Field(ge=0, lt=1)]
RowLimit = Annotated[int, Field(ge=1, le=1_000_000_000)] | Annotated[float, Field(gt=0, lt=1)]
ClassWeight = Annotated[float, Field(gt=0, le=1_000_000)]
PartialDate = Annotated[
    str,
    StringConstraints(pattern=r"^(latest|\d{4}(-\d{2}(-\d{2}([T ]\d{2}(:\d{2}(:\d{2})?)?)?)?)?)$"),
]


class ColumnsSpec(Section):
    """Which column of the source plays which role. A role that the task does not use may
    stay empty."""

    text: ColumnName = "text"
    """Column with the text (text tasks; causal_lm unless one of the next three is set)."""
    words: ColumnName = "tokens"
    """Column with the words of a text: a list of strings (token_classification). CSV
    cannot hold lists: use jsonl or parquet."""
    messages: ColumnName | None = None
    """Column with a chat: a list of `{role, content}`, role system, user or assistant, or
    of ShareGPT's `{from, value}`. The model learns the assistant's turns (causal_lm)."""
    prompt: ColumnName | None = None
    """Column with what is given; needs `completion` (causal_lm)."""
    input: ColumnName | None = None
    """Column with a text that goes below the prompt: the `input` of Alpaca (causal_lm)."""
    completion: ColumnName | None = None
    """Column with what the model learns to answer to `prompt` (causal_lm)."""
    image: ColumnName = "image"
    """Column with the image: encoded bytes, a list of numbers, or the path of a file
    below the source's folder (image tasks; `images` and `sklearn` fill it)."""
    label: ColumnName = "label"
    """Column with the class: a string or an integer; for token_classification a list of
    them, one for each word (not for causal_lm and text_regression)."""
    target: ColumnName | None = None
    """Column with the number to predict, in any unit (text_regression)."""
    key: ColumnName | None = None
    """Column that identifies a record for the hash split; without it the content itself does."""
    group: ColumnName | None = None
    """Column with what several records belong to, such as a customer: the hash split
    keeps all records of a group in one split."""
    time: ColumnName | None = None
    """Column with the record's time (ISO 8601, also partial such as 2026-03); needed by
    `split.by: time` and `window`."""

    @property
    def form(self) -> Literal["text", "completion", "chat"]:
        """What causal_lm reads: which columns are set says so."""
        if self.messages is not None:
            return "chat"
        return "text" if self.completion is None else "completion"


class SplitSpec(Section):
    """How records are divided, the same way on every machine and in every run."""

    by: Literal["hash", "time", "source"] = "hash"
    """`hash` of the record's key; `time`: oldest to train, newest to test; `source`: the
    splits the source has."""
    train: float = Field(0.8, gt=0, lt=1)
    """Share of records to train on."""
    validation: float = Field(0.1, ge=0, lt=1)
    """Share of records that is scored while training."""
    test: float = Field(0.1, gt=0, lt=1)
    """Share of records that only the gate sees."""
    gap: Duration | None = None
    """Time left before validation and before test in a split by time, such as `7 days`:
    records within it are left out."""
    salt: str = Field("", max_length=100)
    """Any text, for a split by hash: with another one other records are the test split,
    and `gate.looks` counts from 0. Those that the champion was trained on judge
    nothing."""


class WindowSpec(Section):
    """A rolling window over the records' time, or over the partitions of a source with
    `{window}` in it."""

    size: Duration
    """Length of the window, such as `6 months` or `30 days`."""
    every: Duration | None = None
    """Distance between two windows; default: `size`. With partitions: the length of one
    partition."""
    end: PartialDate = "latest"
    """Where the window ends: a date (that day, month or year is included) or `latest`,
    the newest period that has records."""
    offset: int = Field(0, ge=0, le=10_000)
    """How many steps of `every` before `end` the window lies."""
    backfill: int = Field(0, ge=0, le=1_000)
    """How many earlier windows `rekindle run` runs first, oldest first."""


Location = Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
Format = Literal["auto", "csv", "jsonl", "parquet", "images", "sklearn", "hub"]


class MixedSource(Section):
    """One source of a mixture. What is left out is as `data` has it."""

    source: Location
    """As `data.source`."""
    weight: float | None = Field(None, gt=0, le=1_000_000)
    """Its share of what is trained on is its weight, divided by the sum of all; give each
    source one, or none."""
    format: Format | None = None
    """As `data.format`."""
    delimiter: Delimiter | None = None
    """As `data.delimiter`."""
    encoding: Encoding | None = None
    """As `data.encoding`."""
    columns: ColumnsSpec | None = None
    """As `data.columns`, in place of all of it."""


class DataSpec(Section):
    """Where the examples come from and how they are divided."""

    source: Location | Literal[""] = ""
    """A URI or path (glob allowed; csv, jsonl, parquet or a folder of images),
    `sklearn:NAME` or `hub:NAME?config=..&revision=..`. Relative paths start at the
    config's folder. `{window}` or `{window:%Y-%m}` stands for a partition."""
    sources: tuple[MixedSource, ...] = Field((), exclude_if=lambda sources: not sources)
    """Several sources in place of `source`, from which training draws by weight."""
    temperature: float | None = Field(None, ge=1, le=1_000, exclude_if=lambda value: value is None)
    """Without weights: the share of each of `sources` is its number of examples to the
    power of 1 / temperature, so that small ones are seen more often. Without either,
    examples count alike."""
    format: Format = "auto"
    """Format of the source; `auto` goes by its prefix or suffix."""
    delimiter: Delimiter = "auto"
    """The character between the columns of a CSV, such as `;`, `|` or `\\t`. `auto`: a
    comma, or a semicolon or tab if the first line has no comma; in `.tsv` a tab."""
    encoding: Encoding = "utf-8"
    """How the characters of CSV and JSON lines are written."""
    columns: ColumnsSpec = ColumnsSpec()
    """Which column plays which role."""
    labels: tuple[str, ...] = ()
    """The classes in index order; a record with another label is refused. Empty: the
    labels found, sorted."""
    on_bad_rows: Literal["refuse", "drop"] = "refuse"
    """What becomes of rows that cannot be used, such as those with an empty text or
    without a label: `refuse` the data, or `drop` the rows, count them, and list them in
    `bad_rows.jsonl`."""
    max_bad_rows: RowLimit = 0.01
    """Most rows that may be dropped: a share of the rows read (below 1), or a number of rows."""
    duplicates: Literal["keep", "exact", "folded", "near"] = "keep"
    """What becomes of copies of a record's content: `keep` them (in several splits they
    are refused); leave later `exact` copies out, or `folded` ones, which differ in case
    or white space at most, or `near` ones, which share most runs of five words. The first
    stays, of train before validation before test."""
    slices: tuple[ColumnName, ...] = ()
    """Columns by whose values evaluation is broken down."""
    split: SplitSpec = SplitSpec()
    """How records are divided into train, validation and test."""
    window: WindowSpec | None = None
    """Select records by time; without it, all of them."""
    max_length: int = Field(128, ge=4, le=131_072)
    """Longest text in tokens; longer ones are cut (text tasks, causal_lm)."""
    packing: bool = True
    """Short texts share a sequence of `max_length` tokens without seeing each other;
    `false` gives each a sequence of its own (causal_lm)."""
    image_size: ImageSize | None = None
    """Height and width in pixels that images are scaled to, or one number for both;
    without it, all must have one size (image tasks)."""
    shard_rows: int = Field(10_000, ge=1, le=10_000_000)
    """Most rows in one shard file, which one worker encodes."""
    shuffle_gb: float = Field(4.0, gt=0, le=10_000)
    """Rows are shuffled within windows of about as many GB of shards, and at most about a
    million rows, which a rank reads one after the other; the shards of an epoch are
    shuffled, too."""
    disk_gb: float | None = Field(None, gt=0)
    """Most GB of a node's disk (below TMPDIR) that shards take while it trains: they stay
    below the artifact root, and are fetched a window ahead. Without it, a node has all of
    them."""
    executor: Literal["local", "ray", "spark"] = "local"
    """What `ingest` and `shard` run their pieces by: processes on the step's machines,
    tasks of Ray Core, or of Spark; the bytes are the same."""
    executor_address: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$")
    """The variable that holds the address of Ray's cluster or Spark's master; without it,
    the cluster or session that is there, or one on the step's machine."""
    nodes: int = Field(1, ge=1, le=4_096)
    """Machines that share the steps `ingest` and `shard`, each with its own processes."""
    workers: int | None = Field(None, ge=1, le=1_024)
    """Processes of a machine; without it, one a core."""

    @property
    def is_numeric(self) -> bool:
        """Whether numbers are to be predicted."""
        return any(part.columns.target is not None for part in self.parts)

    @property
    def parts(self) -> tuple["DataSpec", ...]:
        """One of these for each of `sources`, or this one."""
        if not self.sources:
            return (self,)
        parts = list[DataSpec]()
        for source in self.sources:
            # what concerns all of the sources together does not concern one of them
            update: dict[str, object] = {"sources": (), "temperature": None, "window": None}
            if "{window" in source.source:
                update["window"] = self.window
            for name, value in source:
                if value is not None and name != "weight":
                    update[name] = value
            parts.append(self.model_copy(update=update))
        return tuple(parts)

    @property
    def named(self) -> str:
        """What errors call the source."""
        return ", ".join(part.source for part in self.parts)

    EXECUTION: ClassVar = frozenset({"executor", "executor_address", "nodes", "workers", "disk_gb"})
    """How the work is done, on which no byte depends."""


class TokenizerSpec(Section):
    """A tokenizer trained on the training split: WordPiece, lower-cased, for text and
    token classification; byte-level BPE, which loses nothing, for causal_lm."""

    vocab_size: int = Field(4_096, ge=64, le=500_000)
    """Most entries in the vocabulary."""
    min_frequency: int = Field(2, ge=1)
    """How often a piece, or a pair to be merged, must occur to enter the vocabulary."""


class LoraSpec(Section):
    """Low-rank adapters (LoRA): the base stays frozen, and export merges them into it."""

    rank: int = Field(16, ge=1, le=1_024)
    """Rank of the update of each matrix."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    targets: tuple[str, ...] = ()
    """Names of the linear layers that get adapters, such as `q_proj`; empty: all of a block."""
    base: Literal["full", "4bit"] = Field("full", exclude_if=lambda base: base == "full")
    """How the frozen matrices of blocks are kept: as `train.weights` says, or in 4 bits
    (QLoRA); needs the extra `qlora`, and ranks that are replicas."""


class TeacherSpec(Section):
    """Knowledge distillation: a larger model whose predictions the student also learns from."""

    source: str = Field(min_length=1)
    """The teacher's model folder, or a hub name; same classes or vocabulary as the student."""
    temperature: float = Field(2.0, gt=0, le=100)
    """Both distributions are softened by it."""
    weight: float = Field(0.5, ge=0, le=1)
    """Share of the teacher's term (KL divergence, times the temperature squared) in the loss."""


class ModelSpec(Section):
    """What is trained, and where its weights start."""

    source: str | dict[str, Any] = Field(default_factory=dict)
    """A hub name, a local folder or a URI in Hugging Face layout; or an inline config to
    train from scratch: `{model_type: distilbert, dim: 128, ...}` for text_classification,
    text_regression and token_classification, `{model_type: llama, hidden_size: 256, ...}`
    for causal_lm, `{channels: [32, 64], hidden: 128}` or `{architecture: resnet50}` for
    images."""
    revision: str | None = None
    """Commit, tag or branch of a hub name."""
    init_from: str = Field(
        "base", pattern=r"^(base|champion|run:[A-Za-z0-9._-]+|[A-Za-z0-9+.-]+://.+|[./~].*)$"
    )
    """Where the weights start: `base` (`source` as it is), `champion` (the registry's;
    `base` while there is none), `run:ID`, or the URI or path of a model folder."""
    tokenizer: str | TokenizerSpec | None = None
    """A hub name or folder, or a mapping to train one; default: that of `source`, or a
    trained one for an inline config."""
    lora: LoraSpec | None = None
    """Train low-rank adapters instead of all weights."""
    teacher: TeacherSpec | None = None
    """Learn from another model's predictions, too."""


class CheckpointSpec(Section):
    """How often the training state is saved, and how much of it is kept."""

    every: int | None = Field(100, ge=1)
    """Optimizer steps between two checkpoints; null saves at the end only."""
    keep: int = Field(2, ge=1, le=100)
    """How many of the newest complete checkpoints are kept."""
    keep_best: bool = False
    """Save whenever the validation loss is lower than ever before, keep that checkpoint,
    and make the model of its weights instead of the last."""
    keep_every_hours: float | None = Field(None, gt=0)
    """Keep one for each such span of training time, too; null: none."""


Optimizer = Literal["adamw", "muon", "adamw8bit"]


class LayoutSpec(Section):
    """Degrees of parallelism; their product is the number of ranks."""

    dp: int | None = Field(None, ge=1, le=65_536)
    """Replicas that divide the batch; null: whatever ranks the other degrees leave."""
    shard: int = Field(1, ge=1, le=65_536)
    """Ranks that divide the batch and the weights (FSDP2); with `dp` > 1: HSDP."""
    tp: int = Field(1, ge=1, le=256)
    """Ranks that divide every matrix of a block (tensor parallel); divides the heads."""
    pp: int = Field(1, ge=1, le=256)
    """Stages that divide the blocks (pipeline parallel)."""
    cp: int = Field(1, ge=1, le=256)
    """Ranks that divide the sequence (context parallel); they share the shards of the weights."""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of the micro-batches in the pipeline; the last two give each rank two stages."""


class TrainSpec(Section):
    """How it is trained."""

    epochs: float | None = Field(None, gt=0, le=100_000)
    """Passes over the training split; default 3 unless `steps` is given."""
    steps: int | None = Field(None, ge=1, le=1_000_000_000)
    """Optimizer steps, instead of `epochs`."""
    validate_every: int | None = Field(None, ge=1)
    """Optimizer steps between two validations; null: at the end of each epoch. The last
    step is always followed by one."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """So many validations in a row without a lower loss end the training; null: none do.
    The model has the weights of the lowest, as with `checkpoint.keep_best`."""
    global_batch_size: int = Field(64, ge=1, le=1_000_000)
    """Examples a step, over all ranks and accumulation."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Examples in one forward pass of one rank; `auto` takes the largest divisor of the
    global batch up to 32. The result does not depend on how many ranks share the
    micro-batches."""
    optimizer: Optimizer = Field("adamw", exclude_if=lambda name: name == "adamw")
    """What makes an update of gradients: `adamw`; `muon`, for matrices of blocks, with
    the rate and the weight decay that AdamW would have; `adamw8bit`, AdamW that keeps the
    moments of matrices of blocks in 8 bits (docs/optimizers.md)."""
    lr: float | None = Field(None, gt=0, le=100)
    """Peak learning rate of AdamW; default 1e-3 from scratch. Pretrained weights
    (`model.source` as a name, or `model.init_from`) have no default, because a rate for
    one model destroys another: the error proposes one."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """How the rate changes after the warm-up: `constant`; `linear` or `cosine` decay to
    the end; or `wsd` (warm-up, stable, decay): constant, then linear decay over the last
    `decay` of the steps."""
    warmup: float = Field(0.05, ge=0, lt=1)
    """Share of the steps in which the rate rises from zero."""
    decay: float = Field(0.1, gt=0, le=1)
    """Share of the steps, at the end, in which the rate falls (`lr_schedule: wsd` only)."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where the rate ends, as a share of `lr` (not with `lr_schedule: constant`)."""
    weight_decay: float = Field(0.01, ge=0, le=10)
    """AdamW's decoupled weight decay; biases and norms are left out."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the means of gradients and of their squares, a step; large
    language models from scratch often take (0.9, 0.95)."""
    eps: float = Field(1e-8, gt=0, le=1)
    """AdamW adds it to the root of the mean square, so that small gradients do not take
    full steps."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Largest norm of the gradient; null does not clip."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of the target that is spread over all classes, or over all tokens of a
    language model."""
    class_weights: Literal["balanced"] | dict[str, ClassWeight] | None = None
    """How much an example of each class counts in the training loss; a class that is not
    named counts 1. `balanced` is examples / (classes x examples of the class), so that
    every class counts the same."""
    sampling: Literal["natural", "balanced"] = "natural"
    """`balanced` draws every class equally often: examples of rare classes repeat within
    an epoch, and those of frequent ones take turns from epoch to epoch."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Decides initial weights, data order and dropout."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp64"] = "auto"
    """Arithmetic of the forward and backward pass. `auto` is bf16 on GPUs that have it
    and fp32 elsewhere; a training that resumes keeps what it began with. fp32 on a GPU
    multiplies matrices in TF32 unless `deterministic`; fp16 scales the loss; fp8
    multiplies the matrices of blocks in 8 bits on GPUs that do that (torchao), all else
    in bf16; fp64 is for comparing layouts."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Storage of weights and moments. bf16 halves them, but loses updates below 2^-8 of a
    weight: full fine-tuning with it needs an `lr` of at least 7.8e-5."""
    deterministic: bool = False
    """On GPUs, take only kernels and collectives that give the same bits each time, at
    some cost in speed; the CPU does so anyway. Products in fp32 do not use TF32 then."""
    layout: Literal["auto"] | LayoutSpec = "auto"
    """How the ranks divide the work; `auto` replicates the model on all of them (DDP)."""
    untested: Literal["check", "refuse", "allow"] = "check"
    """A combination of layout, precision and the like that no test covers as a whole,
    although tests cover every pair of its parts (docs/layouts.md, composed): `check`
    compares two steps of a small network with one rank's before training, `refuse`
    refuses it, `allow` trains unchecked."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: `full` recomputes all activations of a block in the
    backward pass; `selective` keeps those of matrix products and attention."""
    compile: bool = False
    """Compile each block with torch.compile."""
    max_bad_steps: int = Field(3, ge=1, le=10_000)
    """Steps in a row whose gradient is not finite are skipped; that many end the training."""
    profile: int = Field(0, ge=0, le=1_000)
    """Optimizer steps to record with torch.profiler, after a few to warm up; the card
    says what they were bound by."""
    ledger: bool = False
    """Write down which examples each rank trained on in each step."""
    grace_seconds: float = Field(110.0, ge=1, le=3_600)
    """Time from a request to stop until the machine is gone; a save that does not fit is
    not begun."""
    hang_seconds: float = Field(600.0, ge=1, le=86_400)
    """A rank without a heartbeat for this long counts as hung: the stacks of all ranks
    are written to the log, and the worker group restarts."""
    start_seconds: float | None = Field(None, ge=1, le=86_400)
    """The same for a start: the worker group counts as hung if no rank of a machine has
    hashed, downloaded or read anything for this long. Default: three times
    `hang_seconds`, and at least two minutes. A start that makes progress may take any
    time."""
    max_hours: float | None = Field(None, gt=0, le=10_000)
    """Wall-clock limit over all restarts of one attempt, which fails then; null: none."""
    budget_hours: float | None = Field(None, gt=0, le=MOST_HOURS)
    """After so many hours of steps, over all attempts, training ends with the weights
    that it has, or with the best, and these are judged; with more of them it goes on from
    there. Null: never, or what `resources.budget_usd` pays for."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """How often the training state is saved."""
    max_restarts: int = Field(3, ge=0, le=1_000)
    """How often a worker group that lost a rank is restarted from the last checkpoint."""
    engine: Literal["rekindle", "deepspeed", "trainer"] = "rekindle"
    """What computes the updates. `deepspeed` is ZeRO with the same batches, saves and
    resumes, and needs the extra of that name; `trainer` is the Trainer of transformers
    with a loop of its own (docs/engines.md)."""
    engine_config: dict[str, Any] | None = None
    """The engine's own settings (`ds_config.json`, TrainingArguments): a JSON file by its
    path, or the mapping itself. What rekindle decides has to be absent there, "auto" or
    equal."""
    launcher: Literal["auto", "torchrun", "mpirun"] = "auto"
    """What starts the ranks of a machine: torchrun, or Open MPI's mpirun."""
    entrypoint: str | None = None
    """Your own torchrun script, instead of rekindle's loop; see the README of
    rekindle/launch for what it receives."""

    @property
    def exports_best(self) -> bool:
        """Whether the model has the weights of the lowest validation loss, not the last ones."""
        return self.checkpoint.keep_best or self.early_stopping_patience is not None


AUTO = "auto"
DEFAULT_EPOCHS = 3.0  # where neither `epochs` nor `steps` says it
SCRATCH_LR = 1e-3  # where `lr` does not say it, and weights start from scratch


class ResourcesSpec(Section):
    """What the steps that train and score ask of a platform. This machine ignores it, and
    says so."""

    MACHINES: ClassVar = (
        "nodes",
        "gpus_per_node",
        "accelerator",
        "machine",
        "spot",
        "max_run_hours",
    )
    """The fields that say what to start; the others are for the plan."""

    nodes: int = Field(1, ge=1, le=10_000)
    """Machines that train together."""
    gpus_per_node: int = Field(0, ge=0, le=64)
    """GPUs on each machine; 0 trains on the CPU."""
    accelerator: str = ""
    """Kind of GPU, such as `H100`; default: any."""
    machine: str = ""
    """The platform's own name of a machine, such as `ml.p5.48xlarge`; `auto`: the
    cheapest that keep `deadline_hours` and `budget_usd`, as many as it takes; default:
    the smallest one that has the GPUs."""
    spot: bool = False
    """Use machines that may be reclaimed; training resumes from its last checkpoint."""
    max_run_hours: float | None = Field(None, gt=0, le=672)
    """Time limit of the training step, and of the step that scores; default: a day."""
    deadline_hours: float | None = Field(None, gt=0, le=10_000)
    """Deadline of the training in hours after submission; the plan keeps to it."""
    budget_usd: float | None = Field(None, gt=0)
    """Most that the training may cost; the plan keeps to it, and on machines with a known
    price it becomes `train.budget_hours`."""
    hazard: Literal["calm", "moderate", "rough", "hostile"] | float = "moderate"
    """How often spot machines are reclaimed, per node and hour; a word for a number of
    the catalog, or the number."""


class GateSpec(Section):
    """When a candidate replaces the champion. Anything missing or not a number refuses."""

    metric: Metric | None = None
    """What is compared; default: accuracy, for token_classification entity_f1, for
    text_regression r2, for causal_lm log_loss. Lower is better for log_loss,
    calibration_error, perplexity, bits_per_byte, and rmse and mae, which have the
    target's unit. roc_auc, average_precision and recall_at_90_precision are of at most 20
    classes. Models with different tokenizers are compared in bits_per_byte, because their
    tokens are not the same."""
    mode: Literal["superiority", "noninferiority"] = "superiority"
    """What the candidate must be: better than the champion by `min_delta`, or not worse
    by `margin`, so that equally good models of newer data replace older ones."""
    min_delta: float = Field(0.0, ge=0)
    """By how much the candidate must be better; the lower bound of its gain has to lie above it."""
    margin: float = Field(0.01, gt=0)
    """By how much it may be worse with `mode: noninferiority`; the lower bound has to lie
    above minus it. 0.01 of accuracy takes 368 test rows that both models answer alike."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Confidence of the two-sided interval of the gain (docs/gate.md)."""
    looks: int | None = Field(None, ge=1, le=10_000)
    """So that all comparisons with champions on one test split, however many, err
    together in at most 1 - `confidence`: the first so many get equal parts of half of
    that, the next of a sixth, a twelfth and so on. Default: each comparison has all of
    it."""
    cluster: ColumnName | None = None
    """One of `data.slices` whose rows belong together, such as those of a patient: its
    values are drawn, not rows, and have to tell as much as ten of equal size. It is no
    slice then."""
    resamples: int = Field(2_000, ge=100, le=1_000_000)
    """Resamples of metrics other than accuracy without a cluster, whose bounds are exact;
    more where `looks` asks for the ends of a tail."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the bootstrap."""
    max_slice_drop: float = Field(0.05, ge=0)
    """Largest drop of accuracy that a slice may have against the champion; for
    token_classification of token_accuracy; for text_regression of r2 (squared errors in
    parts of the variance of all test rows, not of the slice's); for causal_lm, largest
    rise of the loss (log_loss, or bits_per_byte under different tokenizers). A larger one
    refuses unless chance explains it: all slices together refuse a model that is as good
    in at most 1 - `confidence` of cases (Holm)."""
    min_slice_size: int = Field(30, ge=1)
    """Smaller slices are shown but do not decide."""
    max_champion_drop: float | None = Field(None, ge=0)
    """Most by which the champion may do worse on today's test rows than it did when it
    was judged, in the gate's metric. More, where chance does not explain it, refuses
    every candidate until a person looks at the data and their labels: `rekindle promote
    RUN --reason TEXT`. Default: it is said and refuses nothing."""
    max_churn: float | None = Field(None, ge=0, le=1)
    """Largest share of the test examples (for token_classification, of their words) that
    the candidate may answer otherwise than the champion. Not for language models."""


class GoldenRows(Record):
    """What a file of rows holds, so that a run is identified by it, not by the file's path."""

    format: Literal["csv", "tsv", "jsonl"]
    content: str = Field(max_length=1 << 16)  # it travels with the config, into definitions too


class MustPass(Record):
    """Golden rows, and the section by which they are read."""

    rows: GoldenRows
    data: DataSpec


class EvaluateSpec(Section):
    """How the held-out split judges the candidate."""

    floor: dict[Metric, float] = Field(default_factory=dict)
    """What every promoted model must reach on the test split: at least this value, at
    most where lower is better. Always, it must also beat the most frequent class, in the
    gate's metric; for causal_lm, the frequency of single tokens."""
    slice_floor: dict[Metric, float] = Field(default_factory=dict)
    """The same for each value of `data.slices` with at least `gate.min_slice_size` test rows."""
    must_pass: Annotated[GoldenRows | None, WithJsonSchema({"type": ["string", "null"]})] = None
    """A CSV or JSONL file of at most 65,536 characters: rows in the config's own columns,
    each of which a candidate has to predict as it is labelled, or it is refused
    (docs/run.md). Not for language models."""
    audit: float = Field(0.0, ge=0, le=0.5)
    """Share of the test split, drawn by content and `data.split.salt`, that decides
    nothing: what a promoted model reaches there was not picked from many, as its figures
    on the rest are."""
    max_megabytes: float | None = Field(None, gt=0)
    """Most that the files of a promoted model may take, in 10^6 bytes."""
    gate: GateSpec = GateSpec()
    """When a candidate replaces the champion."""


class ImageSpec(Section):
    """What `rekindle images build` makes: an image with your own code."""

    base: str = Field("rekindle-cpu", min_length=1)
    """Image with rekindle in it, to which your own code is added; `make images` builds
    `rekindle-cpu` and `rekindle-train`."""
    include: tuple[str, ...] = ()
    """Files, folders and patterns (`prompts/*.txt`) that the code needs beside what it
    imports: relative ones start at the config's folder. `task`, `train.entrypoint`, and
    the modules that they and the pipeline's components import are there without being
    named."""


class RegisterSpec(Section):
    """Where versions of the model are kept."""

    model_name: Name | None = None
    """Name in the registry; default: the config's `name`."""
    tracking_uri: str = ""
    """MLflow tracking URI; empty: an embedded sqlite database in the home folder.
    Credentials belong in the environment."""
    approval: Literal["auto", "manual"] = "auto"
    """`manual`: a candidate that passed the gate waits for `rekindle promote RUN`."""
    publish: tuple[PublishingPlatform, ...] = ()
    """Platforms whose own model registry gets each champion too, as their sections say."""
    trust_code: bool = False
    """Run the code of a user's own task that a champion, a teacher or the model of
    `init_from` brings, although it is not this config's, byte for byte."""


Received = Literal[
    "name",
    "task",
    "data",
    "model",
    "train",
    "evaluate",
    "register",
    "artifact_root",
    "code_commit",
    "publish",
    "must_pass",
]


Outcome = Literal["success", "refusal", "failure", "suggestion"]


class NotifySpec(Section):
    """Who is told how runs end."""

    webhook: SecretReference
    """The variable with the address, as `env:NAME`: one of Slack, Mattermost or Teams, or
    any that takes `{"text": ...}`."""
    on: tuple[Outcome, ...] = ("success", "refusal", "failure", "suggestion")
    """What of: a `success`, a `refusal` by the gate, a `failure` (also a version that is
    rolled back), and a run that `rekindle watch` only suggests."""


class RetentionSpec(Section):
    """What `rekindle gc` leaves of the runs of this name under a home: those that either
    field keeps. The section of the newest run counts."""

    keep_runs: int = Field(10, ge=1, le=1_000_000)
    """How many of the newest runs stay, here and on each platform, however old they are."""
    older_than_days: int = Field(30, ge=0, le=36_500)
    """Days for which every run stays."""


class Spec(Section):
    """One retraining job: what `rekindle run CONFIG` reads."""

    name: Name
    """Name of the job: lower-case letters, digits, `.`, `_`, `-`."""
    task: str = Field("", pattern=r"^([a-z0-9_]*|.+\.py:[A-Za-z_][A-Za-z0-9_]*)$")
    """What is learned: `causal_lm`, `image_classification`, `text_classification`,
    `text_regression`, `token_classification`, or `path.py:Class` for your own."""
    pipeline: str | None = Field(
        None, pattern=r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$|^.+\.(ya?ml|json)$"
    )
    """Your own pipeline as `path.py:function`, or a compiled one as YAML; default: the
    shipped one."""
    receives: Literal["all"] | tuple[Received, ...] = ()
    """Parameters of your own pipeline that rekindle fills in from this config, each under
    its own name; `all`: each of them that the pipeline has. A section arrives as JSON."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Values of all other parameters of your own pipeline."""
    data: DataSpec | None = None
    """Where the examples come from; the shipped pipeline needs it."""
    model: ModelSpec = ModelSpec()
    """What is trained."""
    train: TrainSpec = TrainSpec()
    """How it is trained."""
    resources: ResourcesSpec = ResourcesSpec()
    """What the steps that train and score ask of a platform."""
    evaluate: EvaluateSpec = EvaluateSpec()
    """How the candidate is judged."""
    registration: RegisterSpec = Field(RegisterSpec(), alias="register")
    """Where versions of the model are kept."""
    deploy: DeploySpec = DeploySpec()
    """How a new champion takes over where it serves, by `rekindle deploy`."""
    schedule: ScheduleSpec | None = None
    """When the platform starts scheduled runs, after `rekindle schedule set`."""
    triggers: TriggersSpec | None = Field(None, exclude_if=lambda triggers: triggers is None)
    """What makes retraining due, for `rekindle watch`."""
    monitor: MonitorSpec | None = Field(None, exclude_if=lambda monitor: monitor is None)
    """How what serves is watched, by `rekindle monitor`; without it nothing is logged."""
    notify: NotifySpec | None = Field(None, exclude_if=lambda notify: notify is None)
    """Who is told how runs end."""
    image: ImageSpec = ImageSpec()
    """What `rekindle images build` makes."""
    retention: RetentionSpec = RetentionSpec()
    """How long runs stay under the home folder."""
    platforms: PlatformsSpec = PlatformsSpec()
    """One section a platform."""

    _origin: tuple[str, tuple[str, ...]] = PrivateAttr(("", ()))

    @property
    def origin(self) -> tuple[str, tuple[str, ...]]:
        """The config that it was loaded from, as given, and the overrides; empty without one."""
        return self._origin

    @property
    def must_pass(self) -> MustPass | None:
        """The rows of `evaluate.must_pass`, and how they are read."""
        rows = self.evaluate.must_pass
        if not rows or self.data is None:
            return None
        return MustPass(rows=rows, data=self.data)

    @property
    def model_name(self) -> str:
        """Name in the registry."""
        return self.registration.model_name or self.name


def recorded_spec(values: Mapping[str, Any]) -> Spec:
    """The spec that a run recorded, without sections of platforms that are not installed any
    more: a record has one of each that was installed then."""
    sections: Mapping[str, Any] = values.get("platforms", {})
    return Spec.model_validate({**values, "platforms": recorded_sections(sections)})
