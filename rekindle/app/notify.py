"""Tells a webhook how a run ended, as `notify` asks: one short text that Slack, Mattermost and
Teams show; and a monitoring system in figures. That they cannot be told changes nothing of the
run."""

import contextlib
import logging
import os
import threading
from pathlib import Path
from urllib.parse import urlsplit

from rekindle.catalog.prices import book
from rekindle.errors import RekindleError
from rekindle.http import HttpError, growing, request, retried
from rekindle.masking import masked
from rekindle.records import RunRecord
from rekindle.report.collect import collect, gate_of, model_of
from rekindle.report.ledger import Entry
from rekindle.spec.model import NotifySpec, Outcome
from rekindle.telemetry import Telemetry

log = logging.getLogger(__name__)

SECONDS = 20.0  # of repetition; a request takes at most 10
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def tell_of(record: RunRecord) -> None:
    """Tell the webhook of the record's config how the run ended, if it is to be told of that."""
    section = record.spec.get("notify")
    if section and (found := _outcome(record)):
        tell(NotifySpec.model_validate(section), *found)


def tell(notify: NotifySpec | None, outcome: Outcome, text: str) -> None:
    """Send the text if `notify` asks for such outcomes; a warning where that fails."""
    if notify is None or outcome not in notify.on:
        return
    name = notify.webhook.removeprefix("env:")
    url = os.environ.get(name, "")
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            # in a thread: an answer that drips in would hold the run up
            sending = threading.Thread(target=_send, args=(url, masked(text)), daemon=True)
            sending.start()
            sending.join(SECONDS + 10)
            if sending.is_alive():
                log.warning("notify.webhook takes too long to answer")
            return
    log.warning("notify.webhook: the variable %s holds no https:// address", name)


def push(record: RunRecord, home: Path) -> None:
    """Give a monitoring system what a run that ended came to, as telemetry.py is asked to."""
    telemetry = Telemetry(config=record.name, platform=record.platform)
    if not telemetry.on:
        return
    found = collect(record, history=False)
    gate, model, metrics = gate_of(found), model_of(found), dict[str, float]()
    usd = None
    if record.submission:
        with contextlib.suppress(RekindleError):  # `rekindle runs --costs` says what is wrong
            usd = Entry.of(record).cost(book(home)).usd
    if found.evidence is not None:
        metrics = {f"metric.{name}": value for name, value in found.evidence.metrics.items()}
    telemetry.set(
        {
            "run.seconds": record.seconds,
            "run.failed": record.status == "failed",
            "run.promoted": gate.promoted if gate else None,
            "run.usd": usd,
            "model.version": float(model.version) if model else None,
            **metrics,
        }
    )
    telemetry.close()


def _send(url: str, text: str) -> None:
    try:
        retried(
            lambda: request(url, body={"text": text}, timeout_seconds=10, parse=False),
            growing(1, 8, SECONDS),
        )
    except HttpError as error:  # the address is a secret: the error names its host only
        log.warning("notify.webhook was not told: %s", error)


def _outcome(record: RunRecord) -> tuple[Outcome, str] | None:
    why = f"It ran because {record.because}. " if record.because else ""
    about = f"{why}Run {record.run_id}" + f" on {record.platform}" * (record.platform != "local")
    if record.status == "failed":
        return "failure", f"{record.name}: the run failed: {record.error}. {about}"
    if record.status != "succeeded":
        return None  # it was stopped, or goes on elsewhere
    gate = gate_of(collect(record, history=False))
    if gate is None and record.settings:
        return None  # one training of a grid
    if gate is None:
        return "success", f"{record.name}: the run succeeded. {about}"
    words = f"{record.name}: {gate.decision.replace('_', ' ')}: {gate.reason.rstrip('.')}. {about}"
    return ("refusal" if gate.decision == "refused" else "success"), words
