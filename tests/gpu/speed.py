"""The last check: a short `make bench-gpu`, one shape, one turn of each contestant."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.here import GIB, ROOT, Here, Row, TooSmall

STEPS = 15


def check_speed(here: Here) -> Iterator[Row]:
    """rekindle, transformers.Trainer and a loop written by hand on the same packs: tokens a second and MFU."""
    sys.path[:0] = [str(ROOT / "tests" / "bench")]
    import bench_gpu

    shape = bench_gpu.SHAPES[0]
    if here.tiny:
        shape = dataclasses.replace(bench_gpu.shrunk(shape), compile=False)
    try:
        here.room_for(0 if here.tiny else 45 * GIB)
    except TooSmall as error:
        yield here.skipped(shape.name, str(error))
        return
    with tempfile.TemporaryDirectory() as folder:
        sides = bench_gpu.turns(shape, Path(folder), 7 if here.tiny else STEPS, count=1)
    for name, (one,) in sides.items():
        if "failed" in one:
            yield here.judged(f"{shape.name}: {name}", one["failed"], False)
            continue
        yield here.figure(f"{shape.name}: {name}", bench_gpu.told(one))
    ours, *others = (
        sides[name][0].get("tokens_per_second") for name in ("rekindle", "Trainer", "by hand")
    )
    for name, other in zip(("Trainer", "by hand"), others, strict=True):
        if ours and other:
            yield here.figure(
                f"{shape.name}: rekindle over {name}, one turn of {STEPS} steps",
                f"{ours / other:.2f}",
            )
