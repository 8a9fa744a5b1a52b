"""`rekindle run CONFIG --rehearse-preemption FAULT@step=N`: proof that a fault changes nothing."""

import logging
from pathlib import Path

from rekindle.app.rehearse import rehearse
from rekindle.cli.options import tell
from rekindle.launch.fault import Fault
from rekindle.records import RehearsalRecord
from rekindle.spec.model import Spec

log = logging.getLogger(__name__)


def rehearsed(spec: Spec, text: str, home: Path, as_json: bool) -> int:
    """Train twice and compare; 0 when equal, 1 when not."""
    fault = Fault.parse(text)
    every = spec.train.checkpoint.every
    if fault.kind != "term" and (every is None or fault.step <= every):
        due = f"the first is due after step {every}" if every else "train.checkpoint.every is null"
        log.warning(
            "step %d comes before any checkpoint (%s): training will begin from its start. To "
            "rehearse a resume, name a later step, or set train.checkpoint.every", fault.step, due,
        )  # fmt: skip
    record = rehearse(spec, fault, home)
    tell(record, _words(record), as_json)
    found = record.rehearsal
    return 0 if found.losses_equal and found.weights_equal else 1


def _words(record: RehearsalRecord) -> str:
    found = record.rehearsal
    lost = f"{found.samples_lost:,} samples trained again" if found.samples_lost else "nothing lost"
    equal = {True: "equal, bit for bit", False: "DIFFERENT"}
    start = f"from step {found.resumed_from_step}"
    if not found.resumed_from_step:
        start = "from the start: no checkpoint was complete, so no resume was rehearsed"
    attempts = "1 attempt" if record.attempts == 1 else f"{record.attempts} attempts"
    return (
        f"fault    {found.fault} at step {found.step}, {record.ranks} ranks, {attempts}\n"
        f"resumed  {start}, {lost}\n"
        f"losses   {equal[found.losses_equal]}\n"
        f"weights  {equal[found.weights_equal]}"
    )
