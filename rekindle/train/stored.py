"""Which stored tensors make which parameters of a network, found from headers alone.

Hub checkpoints keep the names of the day they were written; transformers renames and
joins them as it loads (`embed_out` to `lm_head`, the experts of a block to one tensor).
The rules are transformers' own (`conversion_mapping`, `core_model_loading`): the same
functions are asked, first with tensors on the meta device, so that names and shapes are
known before a weight is read.

`match` refuses a checkpoint that lacks a tensor of the network. The one thing that may be
absent is a head which the task makes new: what the checkpoint's own architecture does not
have either."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTERS = "adapter_config.json"
MOST_HEADER_BYTES = 100 << 20  # as the reference implementation of safetensors has it
SHOWN = 4  # names in a message

_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel",
    "base_model.model.": "PEFT",
}

Shape = tuple[int, ...]


FLOATS = ("F64", "F32", "F16", "BF16")
"""Types that a weight may be stored in, in the words of safetensors."""
SCALES = ("_scale_inv", ".weight_scale", ".SCB", ".absmax", ".qweight", ".qzeros", ".weight_packed")
"""How names of what dequantises a weight end: FP8 of DeepSeek, compressed-tensors,
bitsandbytes, GPTQ and AWQ."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, as the header of its file says; `dtype` in the words of safetensors."""

    file: str
    shape: Shape
    dtype: str


def headers_of(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a folder's safetensors files by name. Of a folder with an index only
    the files that it names count. Raises DataError for no weights, a damaged file, an
    index that is wrong."""
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index)
    paths = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE in paths:  # others beside it are other forms of the same weights
        paths = [folder / SINGLE]
    if (folder / ADAPTERS).is_file():
        message = f"{folder} holds adapters, which are no model of their own"
        fix = "merge them into their base first: peft's merge_and_unload(), then save_pretrained"
        raise DataError(message, where="model.source", fix=fix)
    if not paths:
        message = f"there are no safetensors weights in {folder}"
        fix = "convert the checkpoint: model.save_pretrained(folder) writes safetensors"
        raise DataError(message, where="model.source", fix=fix)
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        if not path.exists():  # as where a cache of downloads was cleared
            message = f"{path.name} is a link to {path.readlink()}, which does not exist"
            fix = "fetch the checkpoint again"
            raise DataError(message, where=str(folder), fix=fix)
        for name, tensor in _read_header(path).items():
            if name in stored:
                message = f"`{name}` is in {stored[name].file} and in {path.name}"
                fix = f"remove one of the files, or add {INDEX}, which says what counts"
                raise DataError(message, where=str(folder), fix=fix)
            stored[name] = tensor
    return stored


def _indexed(folder: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"this is not an index of safetensors files: {type(error).__name__}: {error}"
        raise DataError(message, where=str(index), fix="fetch the checkpoint again") from error
    headers: dict[str, dict[str, StoredTensor]] = {}
    for file in dict.fromkeys(names.values()):
        path = folder / file
        if Path(file).name != file:
            message = f"the index names `{file}`, which is not a file of its folder"
            raise DataError(message, where=str(index), fix="fetch the checkpoint again")
        if not path.is_file():
            message = f"the index names {file}, which is not there"
            raise DataError(message, where=str(index), fix="fetch the checkpoint again")
        headers[file] = _read_header(path)
    absent = [name for name, file in names.items() if name not in headers[file]]
    if absent:
        message = f"the index says that {names[absent[0]]} holds `{absent[0]}`, and it does not"
        raise DataError(message, where=str(index), fix="fetch the checkpoint again")
    return {name: headers[file][name] for name, file in names.items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Format: the README of safetensors. Every tensor has to lie within the file."""
    fix = "fetch the checkpoint again"
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MOST_HEADER_BYTES, path.stat().st_size - 8):
            message = "this is not a whole safetensors file: its header is incomplete"
            raise DataError(message, where=str(path), fix=fix)
        text = file.read(length)
    data_bytes = path.stat().st_size - 8 - length
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        stored = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= data_bytes:
                message = f"`{name}` ends at byte {end} of {data_bytes}: the file is incomplete"
                raise DataError(message, where=str(path), fix=fix)
            shape = tuple(int(size) for size in entry["shape"])
            stored[name] = StoredTensor(path.name, shape, str(entry["dtype"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"the header of this file cannot be read: {type(error).__name__}"
        raise DataError(message, where=str(path), fix=fix) from error
    return stored


@dataclasses.dataclass(frozen=True)
class JoinedTensors:
    """Stored tensors that one rule makes parameters of, and `rule`, a transform of
    transformers. `sources` are (stored name, the rule's pattern for it), in the rule's
    order; `first` is the parameter that the rule is called for."""

    first: str
    sources: tuple[tuple[str, str], ...]
    rule: WeightTransform

    def made(
        self, tensors: Mapping[str, torch.Tensor], network: PreTrainedModel
    ) -> dict[str, torch.Tensor]:
        """The parameters by name, made of stored tensors by name."""
        rule = copy.deepcopy(self.rule)
        for stored, pattern in self.sources:
            rule.add_tensor(self.first, stored, pattern, tensors[stored])
        parameters: dict[str, torch.Tensor] = {}
        converted = rule.convert(self.first, model=network, config=network.config)
        for name, value in converted.items():
            # some rules of transformers give a list of one
            parameters[name] = value[0] if isinstance(value, list) else value
        return parameters


@dataclasses.dataclass(frozen=True)
class Match:
    """How a checkpoint fills a network. `copied`: stored name of each parameter or buffer
    that is stored as it is; `joined`: the group that makes it; `fresh`: names of a new
    head; `unused`: stored names that the network has no use for; `rules`: those that were
    used, for saving."""

    copied: Mapping[str, str]
    joined: Mapping[str, JoinedTensors]
    fresh: tuple[str, ...]
    unused: tuple[str, ...]
    rules: tuple[WeightTransform, ...]


def match(
    network: nn.Module, stored: Mapping[str, StoredTensor], folder: Path, makes_head: bool
) -> Match:
    """What of `stored` fills which part of a network of transformers, built on the meta
    device. `makes_head`: the task may put a new head on the checkpoint's backbone. Raises
    DataError where any other weight is absent, or has another shape."""
    wanted = _shapes_of(network)
    renamings, groups, unused, rules = _assigned(network, stored, wanted)
    state = network.state_dict()
    used = [source for name, source in renamings.items() if state[name].is_floating_point()]
    for group in groups:
        used += [source for source, _ in group.sources]
    _refuse_quantised(network, {name: stored[name].dtype for name in used}, unused, folder)
    _refuse_more_layers(network, used, unused, folder)
    shapes = {name: stored[source].shape for name, source in renamings.items()}
    joined: dict[str, JoinedTensors] = {}
    for group in groups:
        for name, shape in _shapes_made(group, stored, network, folder).items():
            joined[name] = group
            shapes[name] = shape
    aliases = _aliases(network)
    copied = dict(renamings)
    for name in wanted:  # a tied parameter may be stored under any of its names
        for alias in aliases.get(name, ()):
            if name not in shapes and alias in shapes:
                shapes[name] = shapes[alias]
                if alias in joined:
                    joined[name] = joined[alias]
                else:
                    copied[name] = copied[alias]
    missing = [name for name in wanted if name not in shapes and not _may_miss(network, name)]
    misshapen = [name for name in wanted if name in shapes and shapes[name] != wanted[name]]
    fresh: list[str] = []
    if makes_head and (missing or misshapen):
        stored_shapes = {name: shapes[name] for name in misshapen}
        fresh = _new_head(network, folder, missing, stored_shapes)
    lost = [name for name in missing if name not in fresh]
    if lost:
        raise _missing(lost, wanted, stored, folder)
    _refuse_other_shapes([name for name in misshapen if name not in fresh], shapes, wanted, folder)
    return Match(
        copied={name: source for name, source in copied.items() if name not in fresh},
        joined={name: group for name, group in joined.items() if name not in fresh},
        fresh=tuple(fresh),
        unused=tuple(unused),
        rules=tuple(rules),
    )


def _assigned(
    network: PreTrainedModel, stored: Mapping[str, StoredTensor], wanted: Mapping[str, Shape]
) -> tuple[dict[str, str], list[JoinedTensors], list[str], list[WeightTransform]]:
    """Parameters that are copied, groups, stored names without use, and the rules that
    were used: what `convert_and_load_state_dict_in_model` of transformers does with
    names."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(network)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern: dict[str, WeightConverter] = {}
    for rule in converters:
        by_pattern |= dict.fromkeys(rule.source_patterns, rule)
    prefix = network.base_model_prefix
    copied: dict[str, str] = {}
    sources: dict[str, list[tuple[str, str]]] = {}
    unused = []
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if renamed not in wanted and name in wanted:
            renamed, pattern = rename_source_key(name, [], [], prefix, wanted)
        if renamed not in wanted:
            unused.append(name)
        elif pattern is None:
            copied[renamed] = name
        else:
            sources.setdefault(renamed, []).append((name, pattern))
    groups = []
    for first, members in sources.items():
        _, pattern = members[0]
        groups.append(JoinedTensors(first, tuple(members), by_pattern[pattern]))
    return copied, groups, unused, [rule for rule in mapping if rule.was_used()]


def _shapes_of(network: nn.Module) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def _shapes_made(
    group: JoinedTensors, stored: Mapping[str, StoredTensor], network: nn.Module, folder: Path
) -> dict[str, Shape]:
    """Names and shapes of what a group makes, by making it without values."""
    import torch

    empty = {name: torch.empty(stored[name].shape, device="meta") for name, _ in group.sources}
    try:
        parameters = group.made(empty, network)
    except Exception as error:
        message = f"the tensors of {folder} that make `{group.first}` do not fit together: "
        message += f"{type(error).__name__}: {error}"
        raise DataError(message, where="model.source", fix="fetch the checkpoint again") from error
    return {name: tuple(tensor.shape) for name, tensor in parameters.items()}


def _aliases(network: nn.Module) -> dict[str, list[str]]:
    """The other names of each parameter that has several: tied embeddings."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    aliases = {}
    for names_of_one in names.values():
        for name in names_of_one:
            aliases[name] = [other for other in names_of_one if other != name]
    return aliases


def _may_miss(network: PreTrainedModel, name: str) -> bool:
    """Whether transformers computes this tensor itself where a checkpoint lacks it."""
    patterns = network._keys_to_ignore_on_load_missing or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _own_shapes(network: nn.Module, folder: Path) -> dict[str, Shape] | None:
    """The tensors of the architecture that the checkpoint says it is; None where it says none."""
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return None
    names = getattr(config, "architectures", None) or ()
    kind = getattr(transformers, str(names[0]), None) if names else None
    if kind is None:
        return None
    with torch.device("meta"):
        own = kind._from_config(config)
    return _shapes_of(own)


def _new_head(
    network: PreTrainedModel, folder: Path, missing: Sequence[str], misshapen: Mapping[str, Shape]
) -> list[str]:
    """Names of those that a checkpoint for another task cannot have: what its own
    architecture has not, or in the shape in which it is stored (`misshapen`)."""
    own = _own_shapes(network, folder)
    if own is None:
        return []
    names = [name for name in missing if not _has(own, name, network)]
    for name, shape in misshapen.items():
        if _is_new_head(name, shape, own, network):
            names.append(name)
    return names


def _has(own: Mapping[str, Shape], name: str, network: PreTrainedModel) -> bool:
    return any(spelling in own for spelling in _spellings(name, network))


def _spellings(name: str, network: PreTrainedModel) -> list[str]:
    """A parameter's name with the backbone's own in front, and without."""
    prefix = f"{network.base_model_prefix}."
    return [name, name.removeprefix(prefix), f"{prefix}{name}"]


def _is_new_head(
    name: str, shape: Shape, own: Mapping[str, Shape], network: PreTrainedModel
) -> bool:
    """Whether a stored tensor is the head for other classes: right for its own
    configuration, of which the task changes nothing else."""
    return any(own.get(spelling) == shape for spelling in _spellings(name, network))


def _refuse_other_shapes(
    names: Sequence[str], shapes: Mapping[str, Shape], wanted: Mapping[str, Shape], folder: Path
) -> None:
    """Raise DataError if there are names of tensors that are stored in another shape."""
    if names:
        message = f"{folder} holds {counted(names)} in another shape than config.json asks for: "
        message += f"{_sized(shapes[names[0]])} for {_sized(wanted[names[0]])}"
        fix = "correct config.json (a vocabulary that was resized?), or fetch the checkpoint again"
        raise DataError(message, where="model.source", fix=fix)


def _refuse_quantised(
    network: PreTrainedModel, types: Mapping[str, str], unused: Sequence[str], folder: Path
) -> None:
    """Raise DataError where the configuration says that weights are quantised; where one
    that is read has a type (of `types`, by name) of fewer bits, whose scale would be
    lost; or where scales stand among the names without use."""
    settings = getattr(network.config, "quantization_config", None)
    short = [name for name, dtype in types.items() if dtype not in FLOATS]
    scales = [name for name in unused if name.endswith(SCALES)]
    if not settings and not short and not scales:
        return
    method = f"`{scales[0]}` stands beside them" if scales else ""
    if settings:
        fields = settings if isinstance(settings, dict) else settings.to_dict()
        method = fields.get("quant_method", "by a method that it does not name")
    elif short:
        method = f"`{short[0]}` is {types[short[0]]}"
    message = f"the weights in {folder} are quantised ({method}), and cannot be trained"
    fix = (
        "name the checkpoint that they were made of; model.lora.base: 4bit quantises while training"
    )
    raise DataError(message, where="model.source", fix=fix)


def _refuse_more_layers(
    network: PreTrainedModel, read: Sequence[str], unused: Sequence[str], folder: Path
) -> None:
    """Raise DataError where the file holds whole layers, or experts, beyond those of
    config.json: names without use that differ from names that are read by a number under
    which nothing is read.

    Layers that predict further tokens, which transformers leaves out, may be there; and
    so may tensors of a layer that shares those of another one (Gemma 3n)."""
    config = network.config
    if getattr(config, "num_nextn_predict_layers", 0) or getattr(config, "num_mtp_layers", 0):
        return
    ignored = network._keys_to_ignore_on_load_unexpected or ()
    known_kinds = {_unnumbered(name) for name in read}
    known_layers = set[str]()
    for name in read:
        known_layers.update(_numbered_parts(name))
    further = []
    for name in unused:
        is_beyond = any(part not in known_layers for part in _numbered_parts(name))
        is_expected = any(re.search(pattern, name) for pattern in ignored)
        if is_beyond and not is_expected and _unnumbered(name) in known_kinds:
            further.append(name)
    if further:
        message = f"{folder} holds {counted(further)}, beyond the layers that config.json describes"
        fix = "correct config.json (num_hidden_layers?): the model would lose what is in them"
        raise DataError(message, where="model.source", fix=fix)


def _unnumbered(name: str) -> str:
    """The name of a tensor without the numbers of its layer and expert."""
    return re.sub(r"\.\d+(?=\.)", ".N", name)


def _numbered_parts(name: str) -> list[str]:
    """`layers.3.experts.7.up` as what it is in: `layers.3` and `layers.3.experts.7`."""
    return [name[: match.end()] for match in re.finditer(r"\.\d+(?=\.)", name)]


def _missing(
    lost: Sequence[str],
    wanted: Mapping[str, Shape],
    stored: Mapping[str, StoredTensor],
    folder: Path,
) -> DataError:
    """Names what is absent; where every stored name has something in front, that and what to do."""
    prefix = _wrapped_by(lost, stored)
    if prefix is not None:
        by = _WRAPPERS.get(prefix, "what wrapped the model")
        message = f"the names of the weights in {folder} begin with `{prefix}`, as {by} leaves them"
        fix = f"save the model inside of the wrapper, or remove `{prefix}` from the names"
        if prefix == "base_model.model.":
            fix = "merge the adapters first: peft's merge_and_unload(), then save_pretrained"
        return DataError(message, where="model.source", fix=fix)
    message = f"{folder} lacks {counted(lost)} of {len(wanted)} that its architecture has"
    extra = [name for name in stored if name not in wanted]
    if extra:
        message += f"; it holds {len(extra)} under other names, such as {extra[0]}"
    fix = "fetch the checkpoint again, or name one that this version of transformers can read: "
    fix += "from_pretrained of it has to report no missing weights"
    return DataError(message, where="model.source", fix=fix)


def _wrapped_by(lost: Iterable[str], stored: Mapping[str, StoredTensor]) -> str | None:
    """What stands in front of the stored names of all that is lost."""
    first, *remaining = lost
    for name in stored:
        prefix = name.removesuffix(first)
        is_in_front_of_first = prefix not in ("", name)
        if is_in_front_of_first and all(f"{prefix}{other}" in stored for other in remaining):
            return prefix
    return None


def counted(names: Sequence[str]) -> str:
    """The first of the names, and how many there are, for a message."""
    shown = ", ".join(names[:SHOWN])
    if len(names) == 1:
        return shown
    if len(names) > SHOWN:
        shown += ", ..."
    return f"{len(names)} weights ({shown})"


def _sized(shape: Shape) -> str:
    return " x ".join(map(str, shape)) or "a number"


class Saving:
    """Turns parameters, one by one, into the tensors that `save_pretrained` writes of
    them.

    `names` are all the parameters and buffers that will come. The rules are those by
    which the network was loaded, else its architecture's own: `revert_weight_conversion`
    of transformers."""

    def __init__(self, network: PreTrainedModel, names: Iterable[str]) -> None:
        self.network = network
        self.ignored = frozenset(getattr(network, "_keys_to_ignore_on_save", None) or ())
        self._groups, self._renamings = _reversed_rules(network, names)
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """What can be written now, by the name in the file."""
        from transformers.core_model_loading import apply_renamings

        if name in self.ignored:
            return
        group = self._groups.get(name)
        if group is None:
            yield apply_renamings(name, self._renamings), tensor
            return
        arrived = self._waiting.setdefault(group.first, {})
        arrived[name] = tensor
        if len(arrived) == len(group.sources):
            del self._waiting[group.first]
            for stored, whole in group.made(arrived, self.network).items():
                yield apply_renamings(stored, self._renamings), whole


def _reversed_rules(
    network: PreTrainedModel, names: Iterable[str]
) -> tuple[dict[str, JoinedTensors], list[WeightTransform]]:
    """The group that writes a parameter, of those that are not copied; and the renamings."""
    if not hasattr(network, "config"):
        return {}, []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
        dot_natural_key,
    )

    rules = getattr(network, "_weight_conversions", None)
    if rules is None:  # built from a configuration: no file said whether it has a prefix
        own = get_model_conversion_mapping(network, add_legacy=False)
        rules = [rule for rule in own if not isinstance(rule, PrefixChange)]
    reverse = [rule.reverse_transform() for rule in rules[::-1]]
    renamings = [rule for rule in reverse if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in reverse if isinstance(rule, WeightConverter)]
    by_pattern: dict[str, WeightConverter] = {}
    for rule in converters:
        by_pattern |= dict.fromkeys(rule.source_patterns, rule)
    sources: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        first, pattern = apply_converters(name, converters)
        if pattern is None:
            apply_renamings(name, renamings)  # some begin to hold once a name was seen
        else:
            sources.setdefault(first, []).append((name, pattern))
    groups: dict[str, JoinedTensors] = {}
    for first, members in sources.items():
        _, pattern = members[0]
        group = JoinedTensors(first, tuple(members), by_pattern[pattern])
        groups |= dict.fromkeys((name for name, _ in members), group)
    return groups, renamings
