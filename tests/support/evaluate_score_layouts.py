"""What tests share with evaluate/test_score_layouts.py."""

from rekindle.data.ingest import ingest
from rekindle.data.manifest import open_shards
from rekindle.data.shard import shard
from rekindle.tasks import load_task
from tests.support.evaluate_scores import model_of

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 128}


def classifier(task, folder, data, spec):
    ingest(data, load_task(task).modality, "", folder / "examples")
    shard(folder / "examples", data, spec, task, folder / "shards")
    return model_of(
        task, spec, open_shards(folder / "shards"), folder / "model", 3
    ), folder / "examples"
