"""Held-out loss of text classification over many seeds: `python bench_seeds.py FOLDER FIRST COUNT`.

The rows of bench_train's `text` tell speeds apart with five pairs, but not losses, whose ratio varies by 6%
with the draw of order and dropout. Here a pair is our worker and transformers.Trainer, each at
random, on one thread; both run in forks of this process, so that a pair costs its training and not
the imports. Appends a line {seed, ours, theirs} to FOLDER/losses.jsonl; afterwards, and for any
number of such files, `python bench_seeds.py --read FILE ...` prints the mean ratio and its standard
error. Seeds of different processes must not overlap."""

from __future__ import annotations

import json
import math
import os
import runpy
import statistics
import sys
import traceback
from pathlib import Path

import contest
import peers
import torch
import transformers  # noqa: F401  warm for the forks
import work
from transformers import Trainer  # noqa: F401  warm for the forks

import rekindle.train.worker  # noqa: F401  warm for the forks


def forked(script: str, argument: Path, log: Path, module: bool) -> None:
    """Runs `script argument` in a fork; RuntimeError with its output if it fails."""
    child = os.fork()
    if not child:
        code = 1
        try:
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.environ |= contest.alone() if module else {}
            sys.argv = [script, str(argument)]
            run = runpy.run_module if module else runpy.run_path
            run(script, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:  # noqa: BLE001 - the fork ends here, whatever it was
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError(f"{script} failed\n{log.read_text()[-3000:]}")


def ours(given: work.Work, seed: int, folder: Path) -> float:
    output = contest.fresh(folder / "ours")
    given.job(seed, output).write(output / "job.json")
    forked("rekindle.train.worker", output / "job.json", output / "log", module=True)
    return given.held_out(output / "model")


def theirs(given: work.Work, seed: int, folder: Path) -> float:
    output = contest.fresh(folder / "theirs")
    wish = {
        "loop": "trainer",
        "shards": str(given.shards),
        "start": str(given.start(seed)),
        "output": str(output),
        "seed": seed,
        "sampling": "random",
        "packed": False,
        "tokens": False,
        "ranks": 1,
        "lr": given.train.lr,
        "epochs": int(given.train.epochs or 1),
        "steps": -1,
        "batch_size": given.train.global_batch_size,
        "pad_token_id": given.opened().manifest.settings["pad_token_id"],
    }
    (output / "wish.json").write_text(json.dumps(wish))
    forked(str(peers.__file__), output / "wish.json", output / "log", module=False)
    return given.held_out(output / "model")


def read(files: list[Path]) -> None:
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    ratios = [row["ours"] / row["theirs"] for row in rows]
    error = statistics.stdev(ratios) / math.sqrt(len(ratios))
    means = {who: statistics.mean(row[who] for row in rows) for who in ("ours", "theirs")}
    print(
        f"{len(rows)} pairs: {means}, ratio {statistics.mean(ratios):.4f}, "
        f"standard error {error:.4f}, of means {means['ours'] / means['theirs']:.4f}"
    )


def main() -> None:
    if sys.argv[1] == "--read":
        read([Path(word) for word in sys.argv[2:]])
        return
    folder, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    given = work.reviews(folder)
    for seed in range(first, first + count):
        row = {"seed": seed, "ours": ours(given, seed, folder)}
        row["theirs"] = theirs(given, seed, folder)
        with (folder / "losses.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
