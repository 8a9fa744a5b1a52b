"""Configuration, tokenizer and weights of a model in Hugging Face layout."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rekindle.errors import DataError, Problem, RequestError, did_you_mean, first_line
from rekindle.spec.heartbeat import beat
from rekindle.spec.model import ModelSpec
from rekindle.tasks.base import Labels, Settings, Task

if TYPE_CHECKING:
    import tokenizers
    from torch.nn import Module
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# settings that transformers takes for any architecture, or by older names
_GENERAL = {
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "torch_dtype",
    "dtype",
    "layer_types",
    "use_cache",
}
TOKENIZER = "tokenizer.json"
Read = TypeVar("Read")
_NETWORK = "check the name, the revision and the network; a private one needs HF_TOKEN"


class HubTask(Task):
    """A task whose network one of the classes of transformers makes, reads and writes."""

    head: ClassVar[str]
    """The name of that class."""
    imports = ("pandas", "transformers.modeling_layers", "transformers.activations")

    def weights(self, model: ModelSpec) -> Path | None:
        if not isinstance(model.source, str):
            return None
        folder = Path(model.source).expanduser()
        if folder.is_dir():
            return folder
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
        from huggingface_hub.utils.tqdm import tqdm

        # updated for every piece that arrives: a long download is not a run that hangs
        class Bar(tqdm):
            def update(self, n: float | None = 1) -> Any:
                beat()
                return super().update(n)

        try:
            snapshot = snapshot_download(
                model.source,
                revision=model.revision,
                # folders hold the weights in other formats
                ignore_patterns=["*/*"],
                allow_patterns=[
                    "*.safetensors",
                    "*.safetensors.index.json",
                    "config.json",
                    "generation_config.json",
                ],
                tqdm_class=Bar,
            )
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            message = f"cannot fetch the weights of `{model.source}`: {first_line(error)}"
            raise RequestError(message, where="model.source", fix=_NETWORK) from error
        return Path(snapshot)

    def save(self, network: Module, folder: Path, labels: Labels, settings: Settings) -> None:
        network.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]

    def load(self, folder: Path) -> Module:
        import transformers

        kind = getattr(transformers, self.head)
        network, report = kind.from_pretrained(
            folder, dtype="float32", local_files_only=True, output_loading_info=True
        )
        missing = [*report["missing_keys"], *report["mismatched_keys"]]
        if missing:  # transformers gives them random values, and logs it
            message = f"the model lacks {len(missing)} weights of its network, such as {missing[0]}"
            raise DataError(message, where=str(folder), fix="train it again: it is incomplete")
        evaluated: Module = network.eval()
        return evaluated


def check_source(model: ModelSpec, example: str, longest: int) -> None:
    """Refuse a missing model, and an inline config
    that lacks architecture or positions."""
    if model.source == {}:
        fix = f"name one of the Hugging Face hub, or describe one to train from scratch: {example}"
        raise RequestError("no model is named", where="model.source", fix=fix)
    if isinstance(model.source, dict) and "model_type" not in model.source:
        message = "an inline config needs to say which architecture it configures"
        raise RequestError(message, where="model.source", fix=f"add model_type: {example}")
    if isinstance(model.source, dict):
        source = model.source
        positions = source.get("max_position_embeddings") or source.get("n_positions")
        check_positions(positions, longest)


def check_positions(positions: int | None, longest: int) -> None:
    """RequestError where texts of `longest` tokens need more positions than a model has;
    XLNet's -1, like None, is no limit."""
    if positions is not None and 0 < positions < longest:
        message = f"data.max_length is {longest}, but the model has {positions} positions"
        fix = f"set it to at most {positions}, or raise max_position_embeddings (inline config)"
        raise RequestError(message, where="data.max_length", fix=fix)


def configuration(model: ModelSpec, inline: Settings, always: Settings) -> PretrainedConfig:
    """The configuration that `model.source` names, or describes,
    completed by `inline`."""
    from transformers import AutoConfig

    if isinstance(model.source, str):
        try:
            return AutoConfig.from_pretrained(model.source, revision=model.revision, **always)
        except (OSError, ValueError) as error:
            message = f"cannot load the configuration of `{model.source}`: {first_line(error)}"
            raise RequestError(message, where="model.source", fix=_NETWORK) from error
    own_settings = {key: value for key, value in model.source.items() if key != "model_type"}
    model_type = model.source["model_type"]
    _check_keys(model_type, own_settings)
    try:
        return AutoConfig.for_model(model_type, **{**own_settings, **inline, **always})
    except (ValueError, TypeError) as error:
        message = f"not a configuration of {model_type}: {first_line(error)}"
        fix = "see the fields of its configuration class in transformers"
        raise RequestError(message, where="model.source", fix=fix) from error


def _check_keys(model_type: str, own_settings: Settings) -> None:
    """Raise RequestError for a setting that the architecture's code never reads:
    transformers would take it, and nothing would come of it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return  # which has an error of its own
    kind: Any = CONFIG_MAPPING[model_type]
    defaults = kind()
    names = {*defaults.to_dict(), *vars(defaults), *kind.attribute_map}
    known_keys = {*names, *inspect.signature(kind).parameters, *_GENERAL}
    # some settings have no default and are read by name, as an attribute or as a string
    code = "".join(path.read_text() for path in Path(inspect.getfile(kind)).parent.glob("*.py"))
    for attribute, string in re.findall(r"config\.(\w+)|[\"'](\w+)[\"']", code):
        known_keys |= {attribute, string}
    problems = list[Problem]()
    for key in own_settings:
        if key not in known_keys:
            message = f"{model_type} has no setting `{key}`"
            see_fields = f"see the fields of {kind.__name__} in transformers"
            fix = did_you_mean(key, names) or see_fields
            problems.append(Problem(message, "model.source", fix))
    if problems:
        raise RequestError(problems)


def fetch_tokenizer(model: ModelSpec) -> PreTrainedTokenizerBase:
    """The fast tokenizer that `model` names, without padding and truncation."""
    from transformers import AutoTokenizer

    # `revision` is of the model's source, and says nothing of another name
    name = model.source
    revision = model.revision
    if isinstance(model.tokenizer, str):
        name = model.tokenizer
        revision = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        message = f"cannot load the tokenizer `{name}`: {first_line(error)}"
        fix = "check the name and the network, or train one: `tokenizer: {vocab_size: 4096}`"
        raise RequestError(message, where="model.tokenizer", fix=fix) from error
    # a worker reads tokenizer.json, without transformers
    if not tokenizer.is_fast:
        message = f"the tokenizer `{name}` has no fast version"
        fix = "name one with a tokenizer.json, or train one: `tokenizer: {vocab_size: 4096}`"
        raise RequestError(message, where="model.tokenizer", fix=fix)
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


def save_fetched(tokenizer: PreTrainedTokenizerBase, assets: Path) -> None:
    """Save a tokenizer of transformers, also as the file that `tokenizers` reads."""
    tokenizer.save_pretrained(assets)
    tokenizer.backend_tokenizer.save(str(assets / TOKENIZER))


def save_tokenizer(tokenizer: tokenizers.Tokenizer, assets: Path, **config: Any) -> None:
    """Save a tokenizer that was trained here among the assets, in Hugging Face layout."""
    tokenizer.save(str(assets / TOKENIZER))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    text = json.dumps(config, indent=2, sort_keys=True)
    (assets / "tokenizer_config.json").write_text(text + "\n")


def cached_by_tokenizer(read: Callable[[Path], Read]) -> Callable[[Path], Read]:
    """`read`, cached for a folder of assets until its tokenizer is written again."""
    cached = functools.lru_cache(maxsize=4)(lambda assets, *state: read(assets))

    def current(assets: Path) -> Read:
        state = (assets / TOKENIZER).stat()
        return cached(assets, state.st_mtime_ns, state.st_size, state.st_ino)

    return current


def read_tokenizer(assets: Path) -> tokenizers.Tokenizer:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(assets / TOKENIZER))
