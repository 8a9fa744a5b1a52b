"""Predict every row of measured speeds: `python -m tests.plan.validate FILE.csv [--even-odd]`.

Prints each row with its error, then the mean absolute error, the median and the worst, by GPU and
by stack, and the mean over the stacks; rows in fp8, which nothing was fitted to, apart. The columns
are told in measured.py, which understands llm-foundry's tables, too."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rekindle.errors import RekindleError
from rekindle.plan.constants import profile_of
from tests.plan.fit import mape, predicted
from tests.plan.measured import Row, read_rows


def error(row: Row) -> float:
    """Predicted over measured, less one, with the constants that a plan would take."""
    constants = profile_of(row.cluster.gpu.name, row.work.compile).constants
    return predicted(row, constants) / row.tokens_per_second - 1.0


def report(rows: Sequence[Row], even_odd: bool = False) -> Iterator[str]:
    """The lines to print."""
    if not rows:
        yield "the file has no rows"
        return
    errors = [error(row) for row in rows]
    width = max(len(row.name) for row in rows)
    for row, off in zip(rows, errors, strict=True):
        estimate = row.tokens_per_second * (1 + off)
        yield (
            f"{row.name:<{width}}  {row.work.layout!s:<28} {row.work.precision:<5}"
            f" {row.tokens_per_second:>10.1f} tokens/s a GPU,"
            f" predicted {estimate:>10.1f} {off:>+7.1%}"
        )
    yield ""
    known = [(row, off) for row, off in zip(rows, errors, strict=True)]
    plain = [(row, off) for row, off in known if row.work.precision != "fp8"]
    parts = {"all but fp8": plain}
    if even_odd:
        parts |= {"even rows": plain[::2], "odd rows": plain[1::2]}
    for name in dict.fromkeys(row.cluster.gpu.name for row in rows):
        parts[name] = [(row, off) for row, off in plain if row.cluster.gpu.name == name]
    for stack in dict.fromkeys(row.stack for row in rows if row.stack):
        parts[stack] = [(row, off) for row, off in plain if row.stack == stack]
    parts["fp8"] = [(row, off) for row, off in known if row.work.precision == "fp8"]
    for name, members in parts.items():
        if members:
            yield _summary(name, members)
    stacks = [parts[name] for name in dict.fromkeys(row.stack for row in rows) if parts.get(name)]
    if len(stacks) > 1:
        each = [mape(off for _, off in members) for members in stacks]
        yield f"mean over {len(stacks)} stacks  MAPE {statistics.mean(each):5.2f}%"


def _summary(name: str, members: Sequence[tuple[Row, float]]) -> str:
    errors = [off for _, off in members]
    worst = max(members, key=lambda member: abs(member[1]))
    return (
        f"{name:<16} {len(errors):>4} rows  MAPE {mape(errors):5.2f}%"
        f"  median {100 * statistics.median(map(abs, errors)):5.2f}%"
        f"  bias {100 * statistics.mean(errors):+6.2f}%  worst {worst[1]:+.1%} ({worst[0].name})"
    )


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.plan.validate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--even-odd", action="store_true", help="tell the two halves apart")
    asked = parser.parse_args(words)
    try:
        rows = read_rows(asked.file)
    except (RekindleError, OSError) as problem:
        parser.exit(2, f"{problem}\n")
    for line in report(rows, asked.even_odd):
        print(line)


if __name__ == "__main__":
    main()
