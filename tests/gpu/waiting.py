"""Checks that a step never waits: no synchronisation but one read, copies on a stream of their own, from pinned memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rekindle.train.loop import StopFlag, Trainer
from tests.gpu import kernels
from tests.gpu.here import ROOT, Here, Row, alone
from tests.gpu.training import IMAGE, TEXT, UNSAVED, Case, model, plain, step, trainer_of

RESNET = {"architecture": "resnet18"}


def tensors_of(micro):
    found = []
    micro.with_each(lambda tensor: found.append(tensor) or tensor)
    return found


def cases(here: Here) -> dict[str, Case]:
    """A task and an option each."""
    length = 64 if here.tiny else 512
    llama, bf16 = plain("llama", here), {"precision": "bf16"}
    image = {"channels": [4, 8], "hidden": 16, "dropout": 0.1} if here.tiny else RESNET
    return {
        "llama, packed, bf16, clip": Case(llama, length=length, train={**bf16, "clip_norm": 1.0}),
        "llama, packed, bf16, no clip": Case(
            llama, length=length, train={**bf16, "clip_norm": None}
        ),
        "llama, packed, fp16": Case(llama, length=length, train={"precision": "fp16"}),
        "llama, packed, fp32": Case(llama, length=length),
        "llama, unpacked, bf16": Case(llama, length=length, packing=False, train=bf16),
        "llama, packed, bf16, 4 micro-batches": Case(llama, length=length, rows=8, train=bf16),
        "llama, packed, bf16, recomputation": Case(
            llama, length=length, train={**bf16, "activation_checkpointing": "full"}
        ),
        "llama, packed, bf16, LoRA": Case(llama, length=length, lora={"rank": 4}, train=bf16),
        "gpt2, packed, bf16, dropout": Case(model("gpt2", here), length=length, train=bf16),
        "distilbert, texts, bf16, dropout": Case(
            model("distilbert", here), TEXT, length, 16, 8, train=bf16
        ),
        "distilbert, texts, bf16, no dropout": Case(
            plain("distilbert", here), TEXT, length, 16, 8, train=bf16
        ),
        "resnet18, images, bf16": Case(image, IMAGE, 16 if here.tiny else 64, 16, 8, train=bf16),
        "resnet18, images, fp32": Case(image, IMAGE, 16 if here.tiny else 64, 16, 8),
    }


def check_waiting(here: Here) -> Iterator[Row]:
    """Steps 3 and 4 with every synchronisation an error, while the loader makes the next batch."""
    with alone(here):
        for name, case in cases(here).items():
            trainer = trainer_of(case, here.device)
            for number in range(2):
                step(trainer, number)
            found, before = "", None
            for number in (2, 3):
                work = trainer.batches.work(number, 1000)
                found, launched = _waits(here, trainer, number, work)
                if found:
                    break
                if before is not None:
                    before.numbers.read()  # the one read, a step late
                before = launched
            yield here.judged(f"{name}: steps 3 and 4", found or "nothing waits", not found)
            trainer.batches._pool.shutdown()


def _waits(here: Here, trainer: Trainer, number: int, work: Any) -> tuple[str, Any]:
    """Where the step waited for the device, "" if nowhere; and the step."""
    stop = StopFlag(60)
    if not here.cuda:
        return _reads(trainer, lambda: trainer._launch(number, work, stop, UNSAVED))
    torch.cuda.set_sync_debug_mode("error")
    try:
        return "", trainer._launch(number, work, stop, UNSAVED)
    except RuntimeError as error:
        return f"{_place(error)}: {str(error).splitlines()[0][:100]}", None
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _reads(trainer: Trainer, run: Callable[[], Any]) -> tuple[str, Any]:
    """On a CPU, where Python asked for a value; what comes from the loader counts as on the device."""
    from tests.support.train_step import Reads

    moved: Any = trainer.feed
    trainer.feed = lambda micro: [  # type: ignore[assignment, misc]
        m.with_each(lambda t: t.clone()) for m in moved(micro)
    ]
    try:
        with Reads() as reads:
            done = run()
        return "; ".join(reads.found), done
    finally:
        trainer.feed = moved


def _place(error: BaseException) -> str:
    """The last frame of ours, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith(str(ROOT / "rekindle"))] or frames
    return " < ".join(
        f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in (frames[-1], ours[-1])
    )


def check_feed(here: Here) -> Iterator[Row]:
    """Two steps of four micro-batches in a trace of the GPU: where copies run, from which memory, and beside what."""
    with alone(here):
        length = 64 if here.tiny else 1024
        case = Case(plain("llama", here), length=length, rows=8, train={"precision": "bf16"})
        trainer = trainer_of(case, here.device)
        for number in range(2):
            step(trainer, number)
        works = [trainer.batches.make(number) for number in (2, 3)]
        pinned = (
            {t.is_pinned() for work in works for micro in work.micro for t in tensors_of(micro)}
            if here.cuda
            else set()
        )
        yield here.on_gpu("tensors of the loader", f"pinned: {pinned}", pinned == {True})

        def run() -> None:
            done = [
                trainer._launch(n, work, StopFlag(60), UNSAVED)
                for n, work in zip((2, 3), works, strict=True)
            ]
            for one in done:
                one.numbers.read()

        events = kernels.profiled(here.cuda, run)
        copies = kernels.copies_to_device(events)
        ran = [event for event in events if event["cat"] == "kernel"]
        streams, compute = kernels.streams_of(copies), kernels.streams_of(ran)
        text = f"{len(copies)} copies on streams {sorted(streams)}, {len(ran)} kernels on {sorted(compute)}"
        # casting a float input is a kernel on the copies' stream
        yield here.on_gpu(
            "streams of copies and kernels",
            text,
            bool(copies) and len(compute - streams) >= 1 and not _mixed(copies, ran),
        )
        sources = {event["name"] for event in copies}
        yield here.on_gpu(
            "memory that copies read",
            f"{sorted(sources)}",
            bool(sources) and all("Pinned" in name for name in sources),
        )
        yield here.figure(
            "copies under way while a kernel ran",
            f"{kernels.at_once(copies, ran)} of {len(copies)}",
        )
        back = [e for e in events if e["cat"] == "gpu_memcpy" and "DtoH" in e["name"]]
        yield here.on_gpu("copies back to the host", f"{len(back)} in 2 steps", len(back) <= 2)
        trainer.batches._pool.shutdown()


def _mixed(copies: list[dict[str, Any]], ran: list[dict[str, Any]]) -> bool:
    """Whether copies share a stream with most of the kernels."""
    streams = kernels.streams_of(copies)
    return sum(event.get("args", {}).get("stream") in streams for event in ran) > len(ran) / 2
