"""Engines: whose arithmetic trains the network, one file each, by the name in
`train.engine`.

`rekindle` is the loop's own (train/optimizer.py). A new engine is a file here with a
class that is an `Engine`, and a row of this table."""

from rekindle.engines.base import Engine
from rekindle.engines.deepspeed import DeepSpeed
from rekindle.engines.trainer import TransformersTrainer

ENGINES: dict[str, Engine] = {"deepspeed": DeepSpeed(), "trainer": TransformersTrainer()}


def engine_of(name: str) -> Engine | None:
    """The engine of that name; None for rekindle's own arithmetic."""
    return ENGINES.get(name)
