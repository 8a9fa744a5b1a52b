"""The catalog's small tables: what platforms do with features of KFP, Hugging Face configs,
images without Python, presets of hazards, settings of networks. The rows of each are in a
YAML file beside this module, with source and date; what a platform does with features is
in a column in its folder."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from rekindle.errors import RequestError
from rekindle.spec.installed import Verdict, installed_platforms
from rekindle.tables import rows

# Docker Hub, by any of the names that its images may have in front
_LOCAL_COLUMN = Path(__file__).parents[1] / "platforms" / "local" / "features.yaml"
_HUB = re.compile(r"(index\.|registry-1\.)?docker\.io/")


def unknown(kind: str, name: str, known: Iterable[str]) -> RequestError:
    """An error for a `name` that is not in `known`: the fix names the nearest,
    ignoring case."""
    names = list(known)
    by_folded = {known_name.casefold(): known_name for known_name in names}
    nearest = difflib.get_close_matches(name.casefold(), by_folded, n=2, cutoff=0.5)
    fix = f"it has {', '.join(names[:8])}"
    if len(names) > 8:
        fix += ", ..."
    if nearest:
        fix = f"such as {' or '.join(by_folded[folded] for folded in nearest)}"
    return RequestError(f"the catalog has no {kind} `{name}`", fix=fix)


def _table(name: str) -> Any:
    return rows(Path(__file__).with_name(f"{name}.yaml"))


@functools.cache
def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """Hugging Face configs of models that many start from, what shapes a model and no
    more, by every name that is known. `known_configs()["gpt2"]` is `{"model_type":
    "gpt2"}`."""
    configs = {}
    for name, row in _table("models")["models"].items():
        for each_name in (name, *row.get("also", ())):
            configs[each_name] = row["config"]
    return configs


def lacks_python(image: str) -> bool:
    """Whether the image is one that is known to have no python3:
    `lacks_python("alpine:3.20")`."""
    without_digest, _, _ = image.partition("@")
    # a colon before the last slash is that of a registry's port
    repository = re.sub(r":[^/]*$", "", _HUB.sub("", without_digest))
    repository = re.sub(r".*/(?=library/[^/]+$)", "", repository)  # of a mirror
    return any(re.fullmatch(pattern, repository) for pattern in _table("images")["without_python"])


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named hazard, interruptions per node-hour of running on spot,
    and what it rests on."""

    name: str
    per_node_hour: float
    measured: str
    source: str
    as_of: str


@functools.cache
def presets() -> Mapping[str, Preset]:
    """All presets by name, from calm to hostile.
    `presets()["rough"].per_node_hour` is 0.1."""
    # YAML reads a day as a date
    return {row["name"]: Preset(**{**row, "as_of": str(row["as_of"])}) for row in _table("hazards")}


def network(machine: str) -> Mapping[str, str]:
    """The variables of NCCL and libfabric that several machines of this name need to talk
    to each other; nothing for one that is not known. What a row `needs`, a step does not
    bring. `network("ml.p5.48xlarge")["FI_PROVIDER"]` is `efa`."""
    for row in _table("network"):
        if re.fullmatch(row["machines"], machine):
            environment: Mapping[str, str] = row["environment"]
            return environment
    return {}


@dataclasses.dataclass(frozen=True)
class Carried:
    """How a platform carries a feature: `how` it is emulated, what is ignored, or why it
    is refused, by which `source`."""

    verdict: Verdict
    how: str = ""
    source: str = ""
    since: str = ""
    """The platform's first release that has it (`2.17.0`); "" for all that rekindle knows."""


@dataclasses.dataclass(frozen=True)
class Feature:
    """A row: `what` it is in words, and each platform's way with it."""

    name: str
    what: str
    on: Mapping[str, Carried]


@functools.cache
def feature_rows() -> Mapping[str, Feature]:
    """All features by name: the one contract for admission, documentation and tests, of
    which `make generate` writes docs/features.md."""
    columns = {"local": rows(_LOCAL_COLUMN)}
    for platform, platform_class in installed_platforms().classes.items():
        columns[platform] = platform_class.features()
    features = {}
    dataflow = _table("dataflow")
    for name, description in (_table("features") | dataflow).items():
        on = {}
        for platform, column in columns.items():
            if name in column:
                on[platform] = _carried(column[name])
            elif name in dataflow:
                on[platform] = Carried("native")
        features[name] = Feature(name, description, on)
    return features


def _carried(cell: str | Mapping[str, str]) -> Carried:
    """A cell of the table: a verdict alone, or one with its reason and its source."""
    verdicts: tuple[Verdict, ...] = get_args(Verdict)
    if isinstance(cell, str):
        return Carried(verdicts[verdicts.index(cell)])
    # the verdict is the key, and its value the reason or the way
    verdict = next(word for word in verdicts if word in cell)
    return Carried(verdict, cell[verdict], cell.get("source", ""), cell.get("since", ""))
