"""What is known to be wrong with a model before a machine is paid: `-m
rekindle.train.look`.

Reads a `Question` as JSON from stdin and writes the problems as JSON to stdout, in a
process of its own because the control plane loads no torch; where it is loaded, `look` is
called as it is. The network is built without values; of a checkpoint in a local folder
the tokenizer, the configuration and the headers are read."""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rekindle.errors import DataError, Problem, RekindleError, first_line
from rekindle.objectives.numbers import SCALE
from rekindle.spec.model import DataSpec, ModelSpec, TokenizerSpec
from rekindle.tasks import load_task
from rekindle.tasks.base import Settings

STAND_IN_LABELS = ("a", "b")
STAND_IN_VOCABULARY = 4096


class Question(BaseModel):
    """A built-in task of texts and the sections of a config that decide on its network."""

    task: str
    data: DataSpec
    model: ModelSpec
    engine: str = "rekindle"


def main() -> None:
    question = Question.model_validate_json(sys.stdin.read())
    problems = [
        {"what": problem.what, "where": problem.where, "fix": problem.fix}
        for problem in look(question)
    ]
    sys.stdout.write(json.dumps(problems) + "\n")


def look(question: Question) -> list[Problem]:
    """The first thing that is wrong: each depends on those before. What transformers
    itself refuses is one, too: a training would end with it."""
    try:
        _look(question)
    except RekindleError as error:
        return list(error.problems)
    except MemoryError:  # says nothing of the model
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises
        message = f"the network cannot be built: {type(error).__name__}: {first_line(error)}"
        fix = "correct model.source, or the config.json of its folder"
        return [Problem(message, "model.source", fix)]
    return []


def _look(question: Question) -> None:
    import torch

    from rekindle.tasks.pretrained import check_positions
    from rekindle.train import modules
    from rekindle.train.routers import check_losses
    from rekindle.train.stored import headers_of, match

    task = load_task(question.task)
    model = question.model
    folder = local_folder(model)
    headers = None
    if folder is not None:
        headers = headers_of(folder)
        _check_config(folder)
    settings = _settings(question)
    labels: tuple[str, ...] = ()
    if not task.kind.writes:
        labels = tuple(question.data.labels or STAND_IN_LABELS)
    with torch.device("meta"):
        network = task.build(model, labels, settings, Path())
    if folder is not None and headers is not None:
        match(network, headers, folder, task.makes_head)
    check_positions(modules.usable_positions(network), question.data.max_length)
    if folder is not None and not task.kind.writes:  # whose build has checked it
        positions = getattr(network.config, "max_position_embeddings", None)
        check_positions(positions, question.data.max_length)
    if question.engine != "rekindle":
        return
    if task.kind.writes:
        check_losses(network)
    if model.lora is not None:
        origins = modules.unfused(network)
        with torch.device("meta"):
            modules.inject(network, model.lora, origins)


def local_folder(model: ModelSpec) -> Path | None:
    """The folder that `model.source` names, if it is here."""
    if not isinstance(model.source, str):
        return None
    folder = Path(model.source).expanduser()
    return folder if folder.is_dir() else None


def _check_config(folder: Path) -> None:
    """Raise DataError for a configuration that no class of transformers stands behind."""
    config = folder / "config.json"
    if not config.is_file():
        message = f"{folder} has no config.json, which says what network it holds"
        fix = "name a folder that save_pretrained of transformers wrote"
        raise DataError(message, where="model.source", fix=fix)
    try:
        fields = json.loads(config.read_text())
        if not isinstance(fields, dict):
            raise ValueError(f"it is a {type(fields).__name__}")
    except (ValueError, RecursionError) as error:
        message = f"{config} is not a JSON object: {error}"
        raise DataError(message, where="model.source", fix="fetch the checkpoint again") from error
    if "auto_map" in fields and not _knows(str(fields.get("model_type"))):
        message = f"{folder} brings code of its own (auto_map), which is not run"
        fix = "write a task of your own around it: docs/own-code.md"
        raise DataError(message, where="model.source", fix=fix)


def _knows(model_type: str) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _settings(question: Question) -> Settings:
    """Those that `fit` would give, as far as the network depends on them."""
    from rekindle.tasks import pretrained

    data = question.data
    model = question.model
    settings: dict[str, Any] = {
        "max_length": data.max_length,
        "form": data.columns.form,
        "packing": data.packing,
        "vocab_size": STAND_IN_VOCABULARY,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **dict.fromkeys(SCALE, 1.0),
    }
    if isinstance(model.tokenizer, TokenizerSpec):
        settings["vocab_size"] = model.tokenizer.vocab_size
    folder = local_folder(model)
    own = model.tokenizer
    own_is_here = isinstance(own, str) and Path(own).expanduser().is_dir()
    if own_is_here or (own is None and folder is not None):
        tokenizer = pretrained.fetch_tokenizer(model)
        end = tokenizer.eos_token_id
        pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        settings["vocab_size"] = len(tokenizer)
        settings["pad_token_id"] = pad or 0
        settings["eos_token_id"] = end
    elif folder is not None:
        config = pretrained.configuration(model, {}, {})
        settings["vocab_size"] = int(getattr(config, "vocab_size", STAND_IN_VOCABULARY))
    return settings


if __name__ == "__main__":
    main()
