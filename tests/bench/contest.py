"""How contestants are compared: interleaved pairs, the ratio of each pair, its 95% interval.

Two contestants take turns (A B, B A, A B, ...), each turn a process of its own that does the same
work, so that whatever else the machine does falls on both. A row of the table holds the mean of the
pairs' ratios; it reaches its goal if the bound of the interval does, and counts only if the pairs do
not show that the loss on held-out examples is more than 2% worse, or what the row says: the lower
bound of the interval of its ratio is below that. Where the order of examples and dropout are drawn,
that loss varies too much to show more by a few pairs; so a row that draws neither, and whose losses
agree to rounding, stands beside those that do."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORSE = 1.02  # unless a row says otherwise
# two-sided 95% quantiles of Student's t, by degrees of freedom
T95 = {
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
    11: 2.201,
    14: 2.145,
    19: 2.093,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. `ratio` is ours over the peer's: of a rate where more is better
    (`at_least`), of a time else."""

    work: str
    peer: str
    ratio: float
    low: float
    high: float
    goal: float
    at_least: bool
    met: bool
    loss_ours: float | None = None
    loss_peer: float | None = None
    loss_ratio: float | None = None
    loss_half: float | None = None
    ours: float | None = None
    theirs: float | None = None
    unit: str = ""
    gain: str = ""
    ceiling: float | None = None


def compared(
    work: str,
    peer: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    goal: float,
    *,
    at_least: bool,
    losses: tuple[Sequence[float], Sequence[float]] | None = None,
    unit: str = "",
    gain: str = "",
    ceiling: float | None = None,
    worse: float = WORSE,
) -> Row:
    """The row of some pairs; `losses` are ours and the peer's, one a pair; the row is not met where
    ours are shown to be over `worse` times the peer's."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    middle, half = interval(ratios)
    loss_ratio = loss_half = None
    met = middle - half >= goal if at_least else middle + half <= goal
    mine, other = (statistics.mean(one) for one in losses) if losses else (None, None)
    if losses:
        loss_ratio, loss_half = interval([a / b for a, b in zip(*losses, strict=True)])
        met = met and loss_ratio - loss_half <= worse
    return Row(
        work,
        peer,
        middle,
        middle - half,
        middle + half,
        goal,
        at_least,
        met,
        mine,
        other,
        loss_ratio,
        loss_half,
        statistics.mean(ours),
        statistics.mean(theirs),
        unit,
        gain,
        ceiling,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% t interval."""
    freedom = len(values) - 1
    quantile = T95.get(freedom) or T95[max(known for known in T95 if known <= freedom)]
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def pairs(contestants: Mapping[str, Callable[[int], Any]], count: int) -> dict[str, list[Any]]:
    """What each contestant found, called with the pair's number from 0, in turns: forwards,
    backwards, forwards, ..."""
    found: dict[str, list[Any]] = {name: [] for name in contestants}
    for number in range(count):
        order = list(contestants)[:: -1 if number % 2 else 1]
        for name in order:
            found[name].append(contestants[name](number))
            print(f"  pair {number + 1} of {count}, {name}: {found[name][-1]}", flush=True)
    return found


def show(row: Row) -> str:
    """The row as a line of text."""
    sign = ">=" if row.at_least else "<="
    losses = f"  loss {row.loss_ours:.5f} / {row.loss_peer:.5f}" if row.loss_ours else ""
    if row.loss_ratio is not None:
        losses += f", ratio {row.loss_ratio:.6f} +- {row.loss_half:.6f}"
    verdict = "met" if row.met else "NOT MET"
    return (
        f"{row.work:<58} {row.peer:<34} {row.ratio:6.3f} [{row.low:.3f}, {row.high:.3f}]  "
        f"{sign} {row.goal:.3g}  {verdict}{losses}"
    )


def write(rows: Sequence[Row], path: Path) -> None:
    """`bench.json`; rows of an earlier run that this one did not measure again stay."""
    known = (
        {(r["work"], r["peer"]): r for r in json.loads(path.read_text())} if path.exists() else {}
    )
    known |= {(row.work, row.peer): _rounded(dataclasses.asdict(row)) for row in rows}
    path.write_text(json.dumps(list(known.values()), indent=1) + "\n")


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in row.items()}


def environment(threads: int = 1, **more: str) -> dict[str, str]:
    """Of a contestant's process."""
    path = os.pathsep.join(
        [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        **more,
    }


def finished(command: Sequence[str], log: Path, threads: int = 1, **more: str) -> str:
    """What a process printed; RuntimeError with its last lines if it fails."""
    with log.open("w") as out:
        done = subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment(threads, **more),
            timeout=1800,
        )
    text = log.read_text()
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{text[-3000:]}")
    return text


def python(*words: str) -> list[str]:
    """A command for this interpreter."""
    return [sys.executable, *words]


def answer(text: str) -> Any:
    """What the line `BENCH {...}` of an output says."""
    line = next(line for line in text.splitlines() if line.startswith("BENCH "))
    return json.loads(line.removeprefix("BENCH "))


def alone() -> dict[str, str]:
    """The environment of a worker group of one rank, without a launcher."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def fresh(folder: Path) -> Path:
    """The folder, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
