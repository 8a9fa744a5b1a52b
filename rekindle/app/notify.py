"""Tells a webhook how a run ended, as `notify` asks: one short text that Slack,
Mattermost and Teams show; and a monitoring system in figures. A failure to tell them
changes nothing of the run."""

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

SECONDS = 20.0  # of repetition
_REQUEST_SECONDS = 10
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def tell_of(record: RunRecord) -> None:
    """Tell the webhook of the record's config how the run ended, if it asks for that."""
    section = record.spec.get("notify")
    if not section:
        return
    outcome = _outcome(record)
    if outcome is not None:
        kind, text = outcome
        tell(NotifySpec.model_validate(section), kind, text)


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
            sending.join(SECONDS + _REQUEST_SECONDS)
            if sending.is_alive():
                log.warning("notify.webhook takes too long to answer")
            return
    log.warning("notify.webhook: the variable %s holds no https:// address", name)


def push(record: RunRecord, home: Path) -> None:
    """Give a monitoring system the figures of a run that ended, if telemetry is on."""
    telemetry = Telemetry(config=record.name, platform=record.platform)
    if not telemetry.on:
        return
    findings = collect(record, history=False)
    gate = gate_of(findings)
    model = model_of(findings)
    usd = None
    if record.submission:
        with contextlib.suppress(RekindleError):  # `rekindle runs --costs` says what is wrong
            usd = Entry.of(record).cost(book(home)).usd
    metrics = {}
    if findings.evidence is not None:
        metrics = {f"metric.{name}": value for name, value in findings.evidence.metrics.items()}
    figures = {
        "run.seconds": record.seconds,
        "run.failed": record.status == "failed",
        "run.promoted": None,
        "run.usd": usd,
        "model.version": None,
        **metrics,
    }
    if gate is not None:
        figures["run.promoted"] = gate.promoted
    if model is not None:
        figures["model.version"] = float(model.version)
    telemetry.set(figures)
    telemetry.close()


def _send(url: str, text: str) -> None:
    def post() -> None:
        # not parsed: Slack answers `ok`, which is not JSON
        request(url, body={"text": text}, timeout_seconds=_REQUEST_SECONDS, parse=False)

    try:
        retried(post, growing(1, 8, SECONDS))
    except HttpError as error:  # the address is a secret: the error names its host only
        log.warning("notify.webhook was not told: %s", error)


def _outcome(record: RunRecord) -> tuple[Outcome, str] | None:
    """How a run ended, in kind and in words; None for what is not told."""
    reason = f"It ran because {record.because}. " if record.because else ""
    platform = "" if record.platform == "local" else f" on {record.platform}"
    run = f"{reason}Run {record.run_id}{platform}"
    if record.status == "failed":
        return "failure", f"{record.name}: the run failed: {record.error}. {run}"
    if record.status != "succeeded":
        return None  # it was stopped, or goes on elsewhere
    gate = gate_of(collect(record, history=False))
    if gate is None and record.settings:
        return None  # one training of a grid
    if gate is None:
        return "success", f"{record.name}: the run succeeded. {run}"
    decision = gate.decision.replace("_", " ")
    text = f"{record.name}: {decision}: {gate.reason.rstrip('.')}. {run}"
    if gate.decision == "refused":
        return "refusal", text
    return "success", text
