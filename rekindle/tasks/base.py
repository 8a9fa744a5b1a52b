"""A learning objective: how examples become tensors, what learns, what is predicted.

A task has two sides. The data side (`fit`, `encode`) runs in many small processes while
shards are written and must not import torch. The model side runs in every training rank
and in evaluation; it imports torch inside its methods. Shapes: B examples, C classes, T
tokens.

The **examples** that `ingest` writes and `fit` and `encode` read are Arrow batches with
the columns

    id         string       the record's key, or its position in the source
    hash       binary [16]  of the content that the model sees (not of the label)
    split      string       train, validation or test
    label      string       as the source has it, or a list of them: `label_type` of the modality,
                            where it has one; a float64 to predict where `data.columns.target`
                            is set
    MODALITY                the content, in a column with the name and the type that
                            rekindle/modalities says: `text`, `words`, `image`, `document`

and the slice columns, as strings. Shards hold id, hash, `label` as int32 class index (or
a list of them, or a float64), the slice columns, and what `encode` returns."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rekindle.modalities import load_modality
from rekindle.objectives import KINDS
from rekindle.objectives.kind import ObjectiveKind
from rekindle.records import Objective

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import torch
    from torch.nn import Module

    from rekindle.spec.model import DataSpec, ModelSpec

    Passes = Callable[[], Iterator[pa.RecordBatch]]
    """Each call starts a new pass over examples."""
    Columns = dict[str, pa.Array]

REFUSED = "refused"
Settings = Mapping[str, Any]
SAME_NUMBER = "all training examples have the same number"
Labels = tuple[str, ...]


class Task(abc.ABC):
    """One learning objective.
    Subclass it in a file of yours, `path.py:Class` in the YAML."""

    modality: ClassVar[str]
    """What its examples hold: a name of `rekindle.modalities`."""
    objective: ClassVar[Objective] = "classes"
    shares_sequences: ClassVar[bool] = False
    """Whether its network takes several texts in one sequence, each with a position and a
    document of its own, as transformers' encoders do."""
    makes_head: ClassVar[bool] = False
    """Whether a pretrained network gets a new head, whose weights no checkpoint has."""
    imports: ClassVar[tuple[str, ...]] = ("pandas",)
    """What a rank imports for it; pyarrow asks for pandas."""

    @property
    def kind(self) -> ObjectiveKind:
        """What is known of its objective."""
        return KINDS[self.objective]

    def check(self, data: DataSpec, model: ModelSpec) -> None:
        """Raise RequestError for a config that this task can never work with."""
        return

    # Data side: no torch.

    def fit(self, train: Passes, data: DataSpec, model: ModelSpec, assets: Path) -> Settings:
        """What must be learned or fetched before encoding, such as a tokenizer, into the
        folder `assets`; `train()` starts a new pass over the training split, or evenly
        over at most a million of its rows. Returns JSON settings that `encode`, `build`
        and the manifest carry. They and the files must be the same for the same input."""
        return {}

    @abc.abstractmethod
    def encode(self, batch: pa.RecordBatch, settings: Settings, assets: Path) -> Columns:
        """The model's inputs for a batch of examples, as Arrow columns of the same
        length. Runs in worker processes; a column called `input_ids` (a list of integers)
        is counted as tokens, and an example whose `input_ids` is null is left out: it has
        nothing to learn from. A column `REFUSED` (strings) says why an example cannot be
        encoded, null where it can: such a row is one with a fault, as `data.on_bad_rows`
        has it."""

    def notices(self, settings: Settings) -> list[str]:
        """What a user should know of the settings
        that `fit` returned, a sentence each."""
        return []

    def refusals(self, data: DataSpec, model: ModelSpec) -> Callable[[str], str] | None:
        """A function that says why `encode` will refuse the content of an example ("": it
        will not), where that can be known before a run without the network and without
        torch."""
        return None

    # Model side: torch inside.

    @abc.abstractmethod
    def build(self, model: ModelSpec, labels: Labels, settings: Settings, assets: Path) -> Module:
        """The network with fresh weights. The caller has seeded torch, and may have it
        build on the meta device; `weights` names those to start from."""

    def weights(self, model: ModelSpec) -> Path | None:
        """A local folder with the pretrained weights of `model`, as safetensors; None
        where they all start fresh. It may lack a new head (`makes_head`), and nothing
        else."""
        return None

    @abc.abstractmethod
    def collate(self, table: pa.Table, settings: Settings) -> dict[str, torch.Tensor]:
        """Tensors of a batch of shard rows, first dimension B; without the labels."""

    @abc.abstractmethod
    def logits(self, network: Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Unnormalised class scores, [B, C], float; [B, T, C] where words have tags;
        numbers, [B, 1], in deviations from the mean, as `SCALE` of the settings has
        them."""

    @abc.abstractmethod
    def save(self, network: Module, folder: Path, labels: Labels, settings: Settings) -> None:
        """Write weights as safetensors and the configuration, in Hugging Face layout."""

    @abc.abstractmethod
    def load(self, folder: Path) -> Module:
        """The network that `save` wrote, in evaluation mode."""

    # For prediction.

    def hold(self, settings: Settings, assets: Path) -> None:
        """Read into memory what `encode` and the like need of `assets`. A server calls it
        once, before it is ready: what it has proven then answers, whatever becomes of the
        folder. A task of your own whose `encode` reads no file, or keeps what it has
        read, overrides it; otherwise a server ends as soon as the files of its model
        change."""
        return

    def encode_raw(self, inputs: list[Any], settings: Settings, assets: Path) -> pa.Table:
        """Shard rows of contents: texts, lists of words, or uint8 pixels (H, W) or (H, W, C)."""
        import pyarrow as pa

        modality = load_modality(self.modality)
        stored = pa.array([modality.stored(content) for content in inputs], modality.field.type)
        return pa.table(self.encode(pa.record_batch({self.modality: stored}), settings, assets))


class TokenTask(Task):
    """Predicts the next token: several examples may share a sequence, and the score of an
    example is that of its supervised tokens. Shapes: B sequences, T tokens, V vocabulary,
    N examples.

    `encode` gives `input_ids` (list of int32), `supervised` (list of uint8, 1 where the
    token is to be predicted; never the first) and `target_bytes` (int32: of the text that
    these cover)."""

    objective: ClassVar[Objective] = "tokens"

    @abc.abstractmethod
    def collate(
        self,
        table: pa.Table,
        settings: Settings,
        *,
        slots: npt.NDArray[np.int64] | None = None,
        rows: npt.NDArray[np.int64] | None = None,
        length: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """int64 tensors [B, T]: `input_ids`; `position_ids`, from 0 in each example;
        `documents`, 1, 2, ... for the examples of a sequence and 0 for padding; `labels`,
        the token that follows where it is to be predicted, else -100.

        Examples of one slot (int64 [N], ascending; default: a sequence each) stand one
        after the other; those with a negative entry in `rows` are empty. T is `length`,
        or the longest's."""

    @abc.abstractmethod
    def generate(
        self,
        network: Module,
        prompts: list[list[tuple[str, str]]],
        settings: Settings,
        assets: Path,
        max_new_tokens: int,
    ) -> list[str]:
        """The most probable continuation of each document that ends before an answer, on
        a CPU, within three times `train.hang_seconds`."""
