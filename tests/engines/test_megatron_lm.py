"""configs/engines/own_megatron_lm.py, as far as it can be shown without GPUs: its data, and its command line."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from rekindle.data.manifest import open_shards
from rekindle.spec.load import load_target
from tests.support.train_resume import DISTILBERT, written

ENGINES = Path(__file__).parents[2] / "configs" / "engines"
PARSE = """
import json, os, sys, typing, typing_extensions
typing.override = typing_extensions.override  # of Python 3.12
from megatron.training import arguments
from megatron.training.arguments import parse_args, validate_args
arguments.get_device_arch_version = lambda: 9  # an H100
args = validate_args(parse_args())
print(json.dumps({name: value for name, value in vars(args).items() if isinstance(value, int | float | str)}))
"""
WRITE_AND_READ = """
import runpy, sys
from pathlib import Path
from rekindle.data.manifest import open_shards
script, shards, prefix = sys.argv[1:]
runpy.run_path(script)["data"](open_shards(Path(shards)), Path(prefix))
from megatron.core.datasets.indexed_dataset import IndexedDataset
found = IndexedDataset(prefix)
print(len(found), found[7].tolist(), found.document_indices[-1])
"""


def module():
    spec = importlib.util.spec_from_file_location("own_megatron_lm", ENGINES / "own_megatron_lm.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    model = DISTILBERT.model_copy(update={"source": {"model_type": "gpt2"}})
    return open_shards(written(tmp_path_factory.mktemp("texts"), "causal_lm", model))


@pytest.mark.slow
@pytest.mark.skipif(not has("megatron"), reason="megatron-core is not installed")
def test_megatron_reads_the_documents_that_it_writes(tmp_path, texts):
    # in a process of its own: what megatron-core imports fails where another test imported distutils
    words = [ENGINES / "own_megatron_lm.py", texts.folder, tmp_path / "data" / "train"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WRITE_AND_READ, *map(str, words)],
        capture_output=True,
        text=True,
    )
    tokens = texts.table("train").column("input_ids")
    assert done.stdout.split() == f"{len(tokens)} {tokens[7].as_py()} {len(tokens)}".split()


@pytest.mark.slow
@pytest.mark.skipif(not has("megatron.training"), reason="Megatron-LM is not installed")
def test_megatron_takes_the_command_line_of_a_hundred_billion_parameters(texts):
    spec = load_target(ENGINES / "100b-megatron.yaml")
    config = AutoConfig.for_model(**spec.model.source)
    job = {"train": json.loads(spec.train.model_dump_json())}
    words, steps = module().command(job, config, texts, Path("/data/train"), Path("/checkpoints"))
    env = {**os.environ, "WORLD_SIZE": "64", "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PARSE, *words],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    args = json.loads(done.stdout.splitlines()[-1])
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (8, 8)
    assert (args["data_parallel_size"], args["train_iters"]) == (1, steps)
    assert (args["bf16"], args["tokenizer_type"]) == (True, "HuggingFaceTokenizer")
