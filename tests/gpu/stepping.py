"""The check of DeepSpeed: the real worker on the device, with DeepSpeed in the place of rekindle's own arithmetic."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.records import TrainingSummary
from rekindle.spec.model import ModelSpec, TrainSpec
from tests.gpu.arithmetic import OF_LOSSES, off_curve
from tests.gpu.here import Here, Row
from tests.gpu.training import plain

OFFLOADED = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
# precision and ZeRO of each training; as small as the model is, stage 3 would not divide it
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO 1, fp32": ("fp32", {"stage": 1}),
    "ZeRO 2, bf16": ("bf16", {"stage": 2}),
    "ZeRO 3, bf16": ("bf16", {"stage": 3, "stage3_param_persistence_threshold": 0}),
    "ZeRO 3 offloaded, bf16": ("bf16", {"stage": 3, **OFFLOADED}),
}


def check_deepspeed(here: Here) -> Iterator[Row]:
    """24 steps of the same batches, from the same weights, by rekindle's engine in fp32 and by DeepSpeed."""
    from tests.support.train_resume import Gang, written

    if importlib.util.find_spec("deepspeed") is None:
        yield here.skipped("DeepSpeed", "it is not installed")
        return
    given = {
        "steps": 24,
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "lr": 3e-4,
        "precision": "fp32",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = ModelSpec(source=plain("gpt2", here), tokenizer={"vocab_size": 320})
        shards = written(folder, "causal_lm", network)

        def started(place: str, **changed: Any) -> Any:
            spec = TrainSpec.model_validate({**given, **changed})
            return Gang(folder / place, shards, 1, spec, "causal_lm", network).start()

        ours = started("ours")
        theirs = {
            case: started(
                case,
                precision=precision,
                engine="deepspeed",
                engine_config={"zero_optimization": zero},
            )
            for case, (precision, zero) in list(CASES.items())[: 1 if here.tiny else None]
        }
        wanted = [loss for _, loss, *_ in ours.finish().losses]
        for case, gang in theirs.items():
            try:
                gang.finish()
            except AssertionError as error:
                print(error, flush=True)
                last = (str(error).strip().splitlines() or [""])[-1][:200]
                yield here.judged(case, last, False)
                continue
            precision = CASES[case][0]
            found = [loss for _, loss, *_ in gang.losses]
            print(case, wanted, found, flush=True)
            off = off_curve(found, wanted)
            facts = TrainingSummary.read(gang.folder / "training-1" / "training.json").in_effect
            words = ", ".join(f"{name} {value}" for name, value in facts.items())
            text = f"at most {off:.1e} off rekindle in fp32 (allowed {OF_LOSSES[precision]:.0e}); {words}"
            yield here.judged(f"{case}: 24 losses", text, off <= OF_LOSSES[precision])
