"""Checks of what is computed: the optimizer, the loss over 20 steps, fp16's loss scale, compiled blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.gpu.here import Here, Row, alone
from tests.gpu.training import TEXT, Case, losses, plain, seconds_of_steps, step, trainer_of

CPU = torch.device("cpu")
EXACT = 1e-5  # fp32 in another order of sums
OF_NORMS = 2e-5  # a CPU adds squares one after the other: 1e-5 off for a million of them
OF_LOSSES = {"fp32": 2e-3, "bf16": 3e-2}  # over 20 steps, relative to the first


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def largest_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two curves; NaN counts as infinite."""
    found = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    return max((one if one == one else math.inf) for one in found)


def off_curve(ours: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of two curves of losses, over the first loss: what is left of a loss
    that has nearly gone would say nothing."""
    found = [abs(a - b) / expected[0] for a, b in zip(ours, expected, strict=True)]
    return max((one if one == one else math.inf) for one in found)


def check_optimizer(here: Here) -> Iterator[Row]:
    """Three steps of AdamW on the same gradients, on the device and in fp32 on the CPU."""
    with alone(here):
        case = Case(plain("llama", here), train={"clip_norm": 1.0, "weight_decay": 0.1})
        ours, theirs = (trainer_of(case, device).optimizer for device in (here.device, CPU))
        draw = torch.Generator().manual_seed(0)
        before = [held.local.clone() for held in theirs.trained]
        norms: list[list[float]] = [[], []]
        for _ in range(3):
            for a, b in zip(ours.trained, theirs.trained, strict=True):
                made = torch.randn(b.local.shape, generator=draw)
                a.parameter.grad, b.parameter.grad = made.to(here.device), made.clone()
            for optimizer, found in zip((ours, theirs), norms, strict=True):
                squares = optimizer.collect()
                loss = torch.ones((), dtype=torch.float64, device=squares.device)
                found.append(float(optimizer.step(1e-2, loss, squares)[1]))
                optimizer.clear()
        pairs = list(zip(ours.trained, theirs.trained, strict=True))
        weights = max(gap(a.local, b.local) for a, b in pairs)
        updates = max(
            gap(a.local.cpu() - old, b.local - old)
            for (a, b), old in zip(pairs, before, strict=True)
        )
        state = {
            name: max(
                gap(ours.update.state[a.local][name], theirs.update.state[b.local][name])
                for a, b in pairs
            )
            for name in ("exp_avg", "exp_avg_sq")
        }
        norm = largest_gap(*norms)
        seen = f"3 steps of AdamW, {len(pairs)} tensors, clipped, against fp32 on the CPU"
        yield here.judged(seen, f"weights differ by {weights:.1e}", weights <= EXACT)
        yield here.judged("updates of these steps", f"differ by {updates:.1e}", updates <= 1e-3)
        text = ", ".join(f"{name} {size:.1e}" for name, size in state.items())
        yield here.judged("both moments", text, max(state.values()) <= 3 * OF_NORMS)
        yield here.judged("gradient norm", f"differs by {norm:.1e}", norm <= OF_NORMS)
        counts = {float(s["step"]) for s in ours.update.state.values()}
        places = {t.device.type for s in ours.update.state.values() for t in s.values()}
        right = counts == {3.0} and places == {here.device.type}
        yield here.judged("step counters, and where the state lies", f"{counts} on {places}", right)


def check_losses(here: Here) -> Iterator[Row]:
    """20 steps on the same batches from the same weights, on the device and in fp32 on the CPU."""
    with alone(here):
        for kind, task in (("llama", "causal_lm"), ("gpt2", "causal_lm"), ("distilbert", TEXT)):
            length = 64 if here.tiny else 256
            case = Case(plain(kind, here), task, length, train={"lr": 3e-4})
            expected = losses(trainer_of(case, CPU), 20)
            for precision in ("fp32", "bf16"):
                train = {**case.train, "precision": precision}
                trainer = trainer_of(dataclasses.replace(case, train=train), here.device)
                curve = losses(trainer, 20)
                print(kind, precision, expected, curve, flush=True)
                off = off_curve(curve, expected)
                seen = f"{kind}, {precision}, attention by {trainer.parts.attention}: 20 losses"
                text = f"at most {off:.1e} off fp32 on the CPU (allowed {OF_LOSSES[precision]:.0e})"
                yield here.judged(seen, text, off <= OF_LOSSES[precision])


def check_fp16(here: Here) -> Iterator[Row]:
    """An overflow is skipped, the scale is halved, and training goes on."""
    with alone(here):
        case = Case(
            plain("llama", here), length=64 if here.tiny else 256, train={"precision": "fp16"}
        )
        trainer = trainer_of(case, here.device)
        optimizer, scale = trainer.optimizer, trainer.optimizer.scale
        assert scale is not None
        scale.value.fill_(2.0**40)
        before = [held.local.clone() for held in optimizer.trained]
        norms = [step(trainer, number)[1] for number in range(2)]
        untouched = all(
            torch.equal(held.local, old)
            for held, old in zip(optimizer.trained, before, strict=True)
        )
        right = untouched and not any(map(math.isfinite, norms))
        yield here.judged(
            "two steps that overflow", f"norms {norms}, weights untouched: {untouched}", right
        )
        halved = optimizer.loss_scale == 2.0**38
        yield here.judged(
            "the loss scale after them", f"2^{math.log2(optimizer.loss_scale):g}", halved
        )
        searching = 0
        while not math.isfinite(step(trainer, 2 + searching)[1]) and searching < 40:
            searching += 1
        scale_found = math.log2(optimizer.loss_scale)
        curve, more = zip(*(step(trainer, 3 + searching + n) for n in range(20)), strict=True)
        done = 1 + sum(map(math.isfinite, more))  # a step that overflows does not count
        steps = {float(s["step"]) for s in optimizer.update.state.values()}
        falls = statistics.mean(curve[-5:]) < statistics.mean(curve[:5])
        yield here.judged(
            "20 steps more",
            f"scale 2^{scale_found:g}, loss {curve[0]:.3f} to {curve[-1]:.3f}, {21 - done} overflow, counters {steps}",
            falls and steps == {float(done)} and done >= 18,
        )


def check_compile(here: Here) -> Iterator[Row]:
    """Blocks as they are and compiled: loss, graphs, recompilation with other documents, time."""
    with alone(here), _compiler(here):
        for kind, checkpointing in (("llama", "none"), ("llama", "full"), ("gpt2", "none")):
            length = 64 if here.tiny else 1024
            many = {} if here.tiny else {"num_hidden_layers" if kind == "llama" else "n_layer": 8}
            train = {"precision": "bf16", "activation_checkpointing": checkpointing, "lr": 3e-4}
            case = Case({**plain(kind, here), **many}, length=length, train=train)
            expected, plain_seconds = _trained(here, case)
            torch._dynamo.reset()
            from torch._dynamo.utils import counters

            counters.clear()
            compiled = dataclasses.replace(case, train={**train, "compile": True})
            trainer = trainer_of(compiled, here.device)
            curve = losses(trainer, 2)
            first = int(counters["stats"]["unique_graphs"])
            curve += losses(trainer, 6, 2)
            graphs, breaks = int(counters["stats"]["unique_graphs"]), dict(counters["graph_break"])
            seconds = statistics.median(seconds_of_steps(here, trainer, 8, 8))
            name = f"{kind}, recomputation {checkpointing}"
            off = largest_gap(curve, expected)
            yield here.judged(
                f"{name}: 8 losses compiled and not", f"differ by {off:.1e}", off <= 3e-2
            )
            text = f"{first} after 2 steps, {graphs} after 8, {sum(breaks.values())} breaks {' '.join(breaks)[:80]}"
            varlen = (
                trainer.parts.attention == "varlen"
            )  # one call a document breaks a block by design
            right = not breaks and graphs <= 3 if varlen else graphs == first
            yield here.on_gpu(
                f"{name}: graphs of a block, attention by {trainer.parts.attention}", text, right
            )
            yield here.figure(
                f"{name}: median step",
                f"{plain_seconds * 1e3:.1f} ms, compiled {seconds * 1e3:.1f} ms",
            )
            del trainer
            gc.collect()


def _trained(here: Here, case: Case) -> tuple[list[float], float]:
    trainer = trainer_of(case, here.device)
    curve = losses(trainer, 8)
    return curve, statistics.median(seconds_of_steps(here, trainer, 8, 8))


@contextlib.contextmanager
def _compiler(here: Here) -> Iterator[None]:
    """A CPU has the graphs without the compiler behind them, which takes half a minute there."""
    original: Any = torch.compile
    if not here.cuda:
        torch.compile = functools.partial(original, backend="aot_eager")  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original
