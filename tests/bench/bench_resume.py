"""From the start of the launcher to the end of the first step after a checkpoint, on two ranks.

    python tests/bench/bench_resume.py [--pairs 6]

Ours, launched as the fine-tune step launches it, against transformers.Trainer under torchrun, which
is how its users launch it: the same network, so that weights and moments are as large, one
example a rank and step, so that little but the start counts. Both read a checkpoint that lies in
the page cache. Ours hashes every byte before it trusts it. Ceiling: what Python and torch take to
start."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import contest
import work
from contest import Row, compared
from work import Work

from rekindle.launch import events

SAVED, RANKS, GOAL = 4, 2, 1.0
# what `finetune` does on a node, without what follows a training
LAUNCH = """
import sys
from pathlib import Path
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.torchrun import torchrun
from rekindle.train.job import Job
job = Job.read(Path(sys.argv[1]))
words = ["-m", "rekindle.train.worker", sys.argv[1]]
torchrun(words, job.train, status=Path(job.status), rendezvous=Rendezvous(ranks_per_node=RANKS))
""".replace("RANKS", str(RANKS))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")


def rows(folder: Path, count: int = 6) -> list[Row]:
    """Seconds of the pairs' starts; held-out losses play no part."""
    given = work.reviews(folder / "work", dim=768, hidden_dim=3072)
    ours, theirs = _Ours(given, folder / "ours"), _Trainer(given, folder / "trainer")
    found = contest.pairs({"ours": ours.resume, "trainer": theirs.resume}, count)
    size = sum(f.stat().st_size for f in ours.saved.rglob("*") if f.is_file()) / 1e6
    return [
        compared(
            f"resume, {RANKS} ranks, {size:.0f} MB",
            "Trainer",
            found["ours"],
            found["trainer"],
            GOAL,
            at_least=False,
            unit="s",
            gain="fewer imports; shards are read as they lie",
        )
    ]


class _Ours:
    def __init__(self, given: Work, folder: Path) -> None:
        self.given, self.folder, self.saved = given, folder, folder / "saved"
        contest.finished(self._command(self.saved, SAVED), folder / "log")

    def _command(self, output: Path, steps: int) -> list[str]:
        output.mkdir(parents=True, exist_ok=True)
        job = self.given.job(0, output, epochs=None, steps=steps, global_batch_size=RANKS)
        job.write(output / "job.json")
        return contest.python("-c", LAUNCH, str(output / "job.json"))

    def resume(self, number: int) -> float:
        """Seconds until the first new step is done."""
        again = self.folder / "again"
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(self.saved, again)
        return _until(self._command(again, SAVED + 2), _is_first_step)


class _Trainer:
    def __init__(self, given: Work, folder: Path) -> None:
        self.given, self.folder, self.saved = given, folder, folder / "saved"
        folder.mkdir(parents=True)
        contest.finished(self._command(self.saved, SAVED), folder / "log")

    def _command(self, output: Path, steps: int, resume: str | None = None) -> list[str]:
        wish = {
            "loop": "trainer",
            "shards": str(self.given.shards),
            "start": str(self.given.start(0)),
            "output": str(output),
            "seed": 0,
            "sampling": "random",
            "tokens": False,
            "ranks": RANKS,
            "lr": self.given.train.lr,
            "epochs": 1,
            "batch_size": RANKS,
            "pad_token_id": self.given.opened().manifest.settings["pad_token_id"],
            "steps": steps,
            "save": SAVED,
            "resume": resume,
        }
        file = self.folder / "wish.json"
        file.write_text(json.dumps(wish))
        peers = str(Path(__file__).with_name("peers.py"))
        return contest.python(*TORCHRUN, peers, str(file))

    def resume(self, number: int) -> float:
        """Seconds until the first new step is done."""
        command = self._command(
            self.folder / "again", SAVED + 2, str(self.saved / f"checkpoint-{SAVED}")
        )
        return _until(command, lambda line: line.startswith("FIRST STEP"))


def _is_first_step(line: str) -> bool:
    event = events.parse(line)
    return event is not None and event["event"] == "progress" and event["step"] == SAVED + 1


def _until(command: list[str], reached: Callable[[str], bool]) -> float:
    """Seconds from the start of a process to a line of its output; it runs to its end."""
    began, seconds = time.perf_counter(), None
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=contest.environment(),
    )
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if seconds is None and reached(line):
            seconds = time.perf_counter() - began
    if process.wait() or seconds is None:
        raise RuntimeError("".join(said[-40:]))
    return seconds


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--pairs", type=int, default=6)
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), given.pairs):
            print(contest.show(row))


if __name__ == "__main__":
    main()
