"""Fit the constants of the time model to measured rows: `python -m tests.plan.fit FILE.csv
[--write]`.

Fits on the even bf16 rows (0, 2, ...), by the logarithm of the ratio, with a loss that outliers
bend little; prints what the odd ones say, and what rows of each model size say when that size was
left out. `--write` puts the numbers into constants.yaml."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.plan.constants import FILE, profile_of
from rekindle.plan.steptime import Constants
from tests.plan.measured import Row, read_rows
from tests.plan.stacks import step_time

# start, least, most; of each GPU, then of the software
_GPU = {"matrix_efficiency": (0.75, 0.2, 1.0), "attention_efficiency": (0.4, 0.05, 1.0)}
_SOFTWARE = {
    "attention_backward": (3.0, 2.0, 4.0),
    "operand_passes": (1.0, 0.0, 5.0),
    "logit_bytes": (20.0, 0.0, 200.0),
    "hop_seconds": (5e-6, 0.0, 1e-4),
}
_OUTLIER = 0.03

Numbers = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted numbers, by GPU family and of the software."""

    gpus: Mapping[str, Numbers]
    software: Numbers

    def error(self, row: Row) -> float:
        """Predicted over measured tokens a second, less one."""
        return predicted(row, self.constants(row)) / row.tokens_per_second - 1.0

    def constants(self, row: Row) -> Constants:
        """Those of the row's GPU."""
        known = profile_of(row.cluster.gpu.name).constants
        fitted: dict[str, Any] = {**self.gpus[family(row)], **self.software}
        return dataclasses.replace(known, **fitted)


def predicted(row: Row, constants: Constants) -> float:
    """Tokens a second of one GPU."""
    seconds = step_time(row.work, row.cluster, constants).seconds
    work, layout = row.work, row.work.layout
    tokens = layout.micro_batch_size * work.sequence * work.accumulation * layout.data
    return tokens / seconds / row.cluster.gpus


def family(row: Row) -> str:
    """`A100` for either memory."""
    return row.cluster.gpu.name.partition("-")[0]


def fit(rows: Sequence[Row]) -> Fit:
    """The constants that fit best."""
    import numpy as np
    from scipy.optimize import least_squares

    families = sorted({family(row) for row in rows})
    bounds = [*(b for _ in families for b in _GPU.values()), *_SOFTWARE.values()]
    start, least, most = (np.array(column) for column in zip(*bounds, strict=True))

    def unpacked(x: Iterable[float]) -> Fit:
        numbers = iter(x)
        gpus = {name: {key: float(next(numbers)) for key in _GPU} for name in families}
        return Fit(gpus, {key: float(next(numbers)) for key in _SOFTWARE})

    def residuals(x: Iterable[float]) -> list[float]:
        candidate = unpacked(x)
        return [math.log1p(candidate.error(row)) for row in rows]

    found = least_squares(
        residuals,
        start,
        bounds=(least, most),
        x_scale=np.maximum(start, 1e-6),
        loss="soft_l1",
        f_scale=_OUTLIER,
    )
    return unpacked(found.x)


def left_out(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Errors of the rows of each model size under constants fitted to all other sizes."""
    sizes = dict.fromkeys(row.name.split()[0] for row in rows)
    found = {}
    for size in sizes:
        others = fit([row for row in rows if row.name.split()[0] != size])
        found[size] = [others.error(row) for row in rows if row.name.split()[0] == size]
    return found


def mape(errors: Iterable[float]) -> float:
    """Mean absolute error, in percent."""
    return 100 * statistics.mean(abs(error) for error in errors)


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.plan.fit", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--write", action="store_true", help="into constants.yaml")
    asked = parser.parse_args(words)
    rows = [row for row in read_rows(asked.file) if row.work.precision == "bf16"]
    found = fit(rows[::2])
    even, odd = (mape(map(found.error, rows[half::2])) for half in (0, 1))
    print(f"even rows {even:.2f}%, odd {odd:.2f}%")
    by_size = left_out(rows)
    sizes = ", ".join(f"{size} {mape(errors):.1f}%" for size, errors in by_size.items())
    print(f"sizes left out {mape(e for errors in by_size.values() for e in errors):.2f}% ({sizes})")
    for name, numbers in [*found.gpus.items(), ("software", found.software)]:
        print(name, {key: float(f"{value:.4g}") for key, value in numbers.items()})
    if asked.write:
        _write(found)


def _write(found: Fit) -> None:
    """Replace the fitted numbers in the file, and nothing else."""
    text = FILE.read_text(encoding="utf-8")
    for name, numbers in [*found.gpus.items(), ("software", found.software)]:
        for key, value in numbers.items():
            pattern = rf"(^ *{name}:\n(?:^ +\w+: .*\n)*?^ +{key}: )\S+"
            text, times = re.subn(pattern, rf"\g<1>{value:.4g}", text, flags=re.MULTILINE)
            if times != 1:
                sys.exit(f"constants.yaml has no {name}.{key}")
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
