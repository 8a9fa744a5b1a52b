"""What tests share with plan/test_plan.py."""

from __future__ import annotations

from pathlib import Path

from rekindle.catalog.prices import shipped
from rekindle.plan.plan import make
from rekindle.spec.layout import Shape, resolve
from rekindle.spec.layout_support import cell_of, require
from rekindle.spec.load import load_target
from rekindle.spec.model import LayoutSpec

ROOT = Path(__file__).parents[2]
LAMBDA_BOOK = shipped()


def planned(name, *overrides, book=LAMBDA_BOOK, examples=60_000):
    spec = load_target(ROOT / "configs" / "plan" / f"{name}.yaml", overrides)
    return make(spec, book, examples=examples)


def takes(asked, option):
    """Raises if the engine would refuse the option."""
    work, layout = option.work, option.work.layout
    degrees = {axis: getattr(layout, axis) for axis in ("dp", "shard", "tp", "pp", "cp")}
    train = asked.train.model_copy(
        update={
            "layout": LayoutSpec(**degrees, schedule=layout.schedule),
            "micro_batch_size": layout.micro_batch_size,
            "activation_checkpointing": work.checkpointing,
        }
    )
    shape = Shape(work.shape.model_type, work.shape.layers, work.shape.heads, work.shape.kv_heads)
    assert resolve(train, option.cluster.gpus, shape) == layout
    require(cell_of(asked.kind, layout, train, asked.lora is not None))
