"""What a plan takes, beside the estimate that people make otherwise.

    python tests/bench/bench_plan.py [--pairs 5]

Ours: `rekindle plan`, the layouts of a 7B model on eight GPUs weighed, with time, money and
interruptions. The peer: what `accelerate estimate-memory` does for the same model, its size on the
meta device alone. Both start Python anew; neither asks the hub."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import contest
from contest import ROOT, Row, compared

GOAL = 0.5
CONFIG = ROOT / "configs" / "plan" / "7b-spot.yaml"
# of Llama 2 7B: what is not said is the default of transformers
_PEER = """
from accelerate import init_empty_weights
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoModelForCausalLM, LlamaConfig
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32000))
print(calculate_maximum_sizes(model)[0])
"""


def rows(folder: Path, count: int = 5) -> list[Row]:
    """One row: wall seconds of a process."""
    ours = contest.python("-m", "rekindle.cli.main", "plan", str(CONFIG), "--home", str(folder))
    peer = contest.python("-c", _PEER)
    found = contest.pairs(
        {"ours": lambda _: _seconds(ours), "peer": lambda _: _seconds(peer)}, count
    )
    return [
        compared(
            "plan of a 7B model",
            "accelerate estimate-memory",
            found["ours"],
            found["peer"],
            GOAL,
            at_least=False,
            unit="s",
            gain="counts weights without building the model",
        )
    ]


def _seconds(words: list[str]) -> float:
    before = time.perf_counter()
    subprocess.run(words, env=contest.environment(), check=True, capture_output=True, timeout=300)
    return time.perf_counter() - before


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--pairs", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), words.parse_args().pairs):
            print(contest.show(row))


if __name__ == "__main__":
    main()
