"""The training engine against what its users would pick instead, in the same run.

Ours is the worker that `rekindle run` starts, the peers are peers.py; both start from the same
weights, train on the same examples for as many steps, in fp32, with as many threads, and every
figure is from the start of the first step to the end of the last (see contest.py). A pair is a seed.

    text      reviews of 24 words, 2 epochs in batches of 16: Trainer at random, with the batches
              that we draw (the same distribution without the luck of the draw), by length, and
              balanced. Gain: the texts of a batch, drawn at random, are joined in one sequence,
              only attention pads them, and the last block computes first tokens alone behind its
              attention. Ceiling without the latter: the peer's tokens with padding over those
              without
    still     the same without dropout, with the batches that we draw: nothing is left to chance,
              and the held-out losses have to agree
    unpacked  documents of 9 to 704 tokens, the peer one a row. Gain: no padding, attention within
              documents, loss without whole logits. Ceiling: as above
    packed    the same packs in both, documents kept apart in both. Gain: attention document by
              document, loss in pieces. It grows with the length of a pack over that of its documents:
              packs have 1,024 tokens, documents 190 on average
    ddp       the same packs on two ranks, under torchrun and under `accelerate launch`"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contest
import work
from contest import Row, compared
from work import Work

from rekindle.train.history import read_history

ACCELERATE = (
    "-m",
    "accelerate.commands.launch",
    "--cpu",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
)
PEERS = str(Path(__file__).with_name("peers.py"))
Found = dict[str, Any]


def ours(given: Work, folder: Path, ranks: int, number: int, **train: Any) -> Found:
    """A training by our worker; seconds as its own clock has them."""
    output = contest.fresh(folder / "ours")
    job = given.job(number, output, **train)
    job.write(output / "job.json")
    words = ["-m", "rekindle.train.worker", str(output / "job.json")]
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    contest.finished(
        contest.python(*words),
        output / "log",
        given.threads,
        **({} if ranks > 1 else contest.alone()),
    )
    rows = list(read_history(output / "history" / "history.jsonl"))
    return {
        "seconds": sum(row.step_seconds or 0.0 for row in rows),
        "steps": len(rows),
        "loss": given.held_out(output / "model"),
    }


def theirs(
    given: Work,
    folder: Path,
    loop: str,
    number: int,
    *,
    sampling: str = "random",
    packed: bool = False,
    ranks: int = 1,
    batch_size: int | None = None,
    steps: int = -1,
) -> Found:
    """The same by a peer; `steps` instead of the work's epochs."""
    output = contest.fresh(folder / f"{loop}-{sampling}")
    wish = {
        "loop": loop,
        "shards": str(given.shards),
        "start": str(given.start(number)),
        "output": str(output),
        "seed": number,
        "sampling": sampling,
        "packed": packed,
        "tokens": given.task == work.TOKENS,
        "ranks": ranks,
        "lr": given.train.lr,
        "epochs": int(given.train.epochs or 1),
        "steps": steps,
        "batch_size": batch_size or given.train.global_batch_size,
        "pad_token_id": given.opened().manifest.settings["pad_token_id"],
    }
    (output / "wish.json").write_text(json.dumps(wish))
    words = [PEERS, str(output / "wish.json")]
    if ranks > 1:
        words = [*ACCELERATE, "--num_processes", str(ranks), *words]
    text = contest.finished(contest.python(*words), output / "log", given.threads)
    return {**contest.answer(text), "loss": given.held_out(output / "model")}


def _rates(found: list[Found], units: float) -> list[float]:
    return [units / one["seconds"] for one in found]


def _losses(found: dict[str, list[Found]], peer: str) -> tuple[list[float], list[float]]:
    return [one["loss"] for one in found["ours"]], [one["loss"] for one in found[peer]]


STILL = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)


def still(folder: Path, count: int) -> list[Row]:
    return _texts(work.reviews(folder, **STILL), folder, count, {"our_batches": (1.8, 1.0001)})


def text(folder: Path, count: int) -> list[Row]:
    # what the ratio should be, and how much worse than the peer's the held-out loss may be
    goals = {
        "random": (1.8, 1.01),
        "our_batches": (1.8, 1.01),
        "group_by_length": (1.0, 1.0),
        "batch_rebalance": (1.2, 1.02),
    }
    return _texts(work.reviews(folder), folder, count, goals)


def _texts(
    given: Work, folder: Path, count: int, goals: dict[str, tuple[float, float]]
) -> list[Row]:
    name = "text classification, reviews" + ("" if len(goals) > 1 else ", no dropout")
    examples = given.opened().rows("train") * (given.train.epochs or 1)
    contestants: dict[str, Callable[[int], Found]] = {
        "ours": functools.partial(ours, given, folder, 1),
        **{s: functools.partial(theirs, given, folder, "trainer", sampling=s) for s in goals},
    }
    found = contest.pairs(contestants, count)
    rows = []
    for sampling, (goal, worse) in goals.items():
        ceiling = found[sampling][0]["padded"] / found[sampling][0]["tokens"]
        rows.append(
            compared(
                name,
                f"Trainer, {sampling}",
                _rates(found["ours"], examples),
                _rates(found[sampling], examples),
                goal,
                at_least=True,
                losses=_losses(found, sampling),
                worse=worse,
                unit="examples/s",
                ceiling=ceiling,
                gain="texts joined in one sequence; first tokens alone in the last block",
            )
        )
    return rows


def unpacked(folder: Path, count: int) -> list[Row]:
    given = work.documents(folder)
    shards = given.opened()
    tokens = float(shards.targets("train").sum())
    steps = work.packed_order(given, 0).steps_in_epoch
    size = -(-shards.rows("train") // steps)  # for as many steps as packs make
    contestants = {
        "ours": functools.partial(ours, given, folder, 1),
        "trainer": functools.partial(theirs, given, folder, "trainer", batch_size=size),
    }
    found = contest.pairs(contestants, count)
    ceiling = found["trainer"][0]["padded"] / found["trainer"][0]["tokens"]
    return [
        compared(
            "causal LM, documents of mixed length",
            f"Trainer, {size} documents a batch",
            _rates(found["ours"], tokens),
            _rates(found["trainer"], tokens),
            1.5,
            at_least=True,
            losses=_losses(found, "trainer"),
            unit="targets/s",
            ceiling=ceiling,
            gain="packing: no padding, attention within documents; no whole logits",
        )
    ]


def packed(folder: Path, count: int) -> list[Row]:
    given = work.documents(folder)
    tokens = float(given.opened().targets("train").sum())
    peers = {"trainer": "Trainer", "accelerate": "accelerate's loop"}
    contestants: dict[str, Callable[[int], Found]] = {
        "ours": functools.partial(ours, given, folder, 1)
    }
    for loop in peers:
        contestants[loop] = functools.partial(
            theirs, given, folder, loop, packed=True, sampling="sequential"
        )
    found = contest.pairs(contestants, count)
    return [
        compared(
            "causal LM, the same packs",
            name,
            _rates(found["ours"], tokens),
            _rates(found[loop], tokens),
            1.1,
            at_least=True,
            losses=_losses(found, loop),
            unit="targets/s",
            gain="attention document by document; loss in pieces",
        )
        for loop, name in peers.items()
    ]


def ddp(folder: Path, count: int) -> list[Row]:
    given = work.documents(folder)
    tokens = float(given.opened().targets("train").sum())
    contestants = {
        "ours": functools.partial(ours, given, folder, 2),
        "accelerate": functools.partial(
            theirs, given, folder, "accelerate", packed=True, sampling="sequential", ranks=2
        ),
    }
    found = contest.pairs(contestants, count)
    return [
        compared(
            "DDP, 2 ranks, the same packs",
            "accelerate launch",
            _rates(found["ours"], tokens),
            _rates(found["accelerate"], tokens),
            0.97,
            at_least=True,
            losses=_losses(found, "accelerate"),
            unit="targets/s",
            gain="as packed; the next batch is made meanwhile",
        )
    ]
