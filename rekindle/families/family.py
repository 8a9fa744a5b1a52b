"""What a family of architectures is: `Family`, the numbers, and `Modules`, the names, as
transformers 5 has them. To add a family, add a row to families.yaml."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rekindle.tables import rows

Norm = Literal["rms", "layer"]
Gelu = Literal["fused", "written"]

DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout")
ROW = ("o", "down")  # matrices that tensor parallel ranks divide by rows, others by columns


@dataclasses.dataclass(frozen=True)
class Modules:
    """What the engine must know to cut a network of transformers: its blocks, the
    matrices that tensor parallelism divides, what only the first or the last pipeline
    stage runs.

    Names are relative to a block for `matrices`, `regions`, `per_head`, `sequence`,
    `attention` and `behind`, to the backbone otherwise. `matrices` are those of a block
    by plan/shape.py's names: q, k, v, o; gate, up, down. `regions` are the modules of a
    block whose input goes into divided columns. `first` are what only the first stage
    runs (modules, or rates of dropout), `last` what only the last does; `table` is the
    token embedding, `positions` an embedding that is added to it. `sequence` names the
    norms where the residual stream may be divided along the sequence between tp ranks.
    `summary` is the module that makes a text's summary of its first token, "" where what
    follows the backbone does; None where there is none. `behind` is the module of a block
    that attention's result goes into: from it on no token depends on another one."""

    blocks: str
    matrices: Mapping[str, str]
    regions: tuple[str, ...]
    attention: str
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    table: str = ""
    positions: str = ""
    per_head: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    summary: str | None = None
    behind: str = ""

    @property
    def column(self) -> tuple[str, ...]:
        """Matrices that are divided by their outputs."""
        return tuple(module for name, module in self.matrices.items() if name not in ROW)

    @property
    def row(self) -> tuple[str, ...]:
        """Matrices that are divided by their inputs."""
        return tuple(module for name, module in self.matrices.items() if name in ROW)


@dataclasses.dataclass(frozen=True)
class Family:
    """What an architecture does with the numbers of its config.

    `defaults` are those of its configuration class; `names` its own words for the common
    ones; `norms` are counted per block, `head_norms` are two more over each head's
    queries and keys; `biases_fixed`: the config does not decide on attention's.
    `spare_positions` are rows of the learnt position table that no position uses, None
    where there is no table. `dropouts` are those of a block behind attention and
    feed-forward. `gelu` tells whether one kernel computes it, or transformers writes it
    out. `modules` is None where the engine cuts nothing: such a model trains in layouts
    of dp and shard."""

    defaults: Mapping[str, object]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: Modules | None = None
    gated: bool = False
    norm: Norm = "layer"
    norms: int = 2
    head_norms: bool = False
    qkv_bias: bool = True
    out_bias: bool = True
    ffn_bias: bool = True
    biases_fixed: bool = False
    spare_positions: int | None = None
    token_types: bool = False
    first_norm: bool = False
    last_norm: bool = True
    pooler: bool = False
    pre_classifier: bool = False
    causal: bool = True
    score_bias: bool = False
    patches: bool = False
    dropouts: int = 2
    gelu: Gelu = "fused"


@dataclasses.dataclass(frozen=True)
class Config:
    """A config, `own`, asked in common words; where `family` is not known, `aliases` are tried."""

    own: Mapping[str, object]
    family: Family | None
    aliases: Mapping[str, tuple[str, ...]]

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The value under the family's own name or the common one, else its default."""
        tables = [self.own]
        names = (*self.aliases.get(name, ()), name)
        if self.family is not None:
            tables.append(self.family.defaults)
            names = (self.family.names.get(name, name), name)
        for table in tables:
            for own_name in names:
                value = table.get(own_name)
                if value is not None:
                    return value
        return otherwise


def _family(row: dict[str, Any]) -> Family:
    fields = dict(row)
    if row.get("modules") is not None:  # null where the engine cuts nothing
        names = dict(row["modules"])
        for name, value in names.items():
            if isinstance(value, list):
                names[name] = tuple(value)
        fields["modules"] = Modules(**names)
    return Family(**fields)


_ROWS = rows(Path(__file__).with_name("families.yaml"))["families"]
FAMILIES: Mapping[str, Family] = {name: _family(row) for name, row in _ROWS.items()}
"""By transformers' `model_type`."""
