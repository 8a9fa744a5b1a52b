"""`rekindle watch CONFIG`: retrains when the data say so, and says why or why not."""

import functools
import logging
import time
from pathlib import Path

import click

from rekindle.app.prepared import prepare_for, prepare_here
from rekindle.app.run import RunOptions, windows
from rekindle.app.submit import submit_prepared
from rekindle.app.watch import Act, turn
from rekindle.cli.options import Overrides, moment, of_config, platform, shared, tell, yes
from rekindle.cli.run import carry_out, gate_text
from rekindle.cli.submit import ask_to_submit
from rekindle.data.window import parse_duration
from rekindle.errors import (
    InterruptedRunError,
    PreemptedError,
    RekindleError,
    RequestError,
)
from rekindle.records import Turn
from rekindle.spec.load import load_target
from rekindle.spec.model import Outcome, Spec

log = logging.getLogger(__name__)

SUGGESTED = 3  # exit code
_DAYS_PER_MONTH = 30.4375
_SECONDS_PER_DAY = 86_400.0


@click.command("watch")
@of_config
@click.option("--once", is_flag=True, help="Look once, then exit: for cron and other schedulers.")
@click.option(
    "--interval",
    default="1 hour",
    show_default=True,
    metavar="DURATION",
    help="Pause between looks, such as `6 hours`.",
)
@platform("Submit what is due there; default: run it here.")
@click.option("--now", metavar="TIME", help="Decide as if it were TIME (UTC): for replays.")
@yes
@shared
def command(
    config: Path,
    overrides: Overrides,
    once: bool,
    interval: str,
    platform: str | None,
    now: str | None,
    yes: bool,
    home: Path,
    as_json: bool,
) -> int:
    """Look whether CONFIG's section `triggers` makes retraining due, and retrain if so.

    Each look ends with one line, `ran because ...` or `skipped because ...`, which is
    kept under the home. Without `triggers`, changed data make it due. A look that was
    killed is completed by the next one. CONFIG is read again each time.

    Exit codes with --once: 0 ran or skipped, 3 a run is due and `act: suggest` keeps it
    from starting, else those of `rekindle run` or `submit`."""
    pause_seconds = _seconds(interval)
    at = moment(now)
    is_first = True
    while True:
        try:
            # read at each look: the file may have been changed
            spec = windows(load_target(config, overrides))[-1]
            act = _act(spec, platform, home, yes, as_json)
            done = turn(spec, home, act, at, platform or "local")
        except (RekindleError, OSError) as error:
            # later looks wait for what may be repaired meanwhile
            if once or is_first or isinstance(error, PreemptedError | InterruptedRunError):
                raise
            log.warning("%s: %s\nthe next look is in %s", config, error, interval)
        else:
            tell(done, _line(done), as_json)
            if once:
                return SUGGESTED if done.decision == "suggested" else 0
        is_first = False
        time.sleep(pause_seconds)


def _act(spec: Spec, platform: str | None, home: Path, yes: bool, as_json: bool) -> Act:
    """What runs a turn that is due: on the platform, or here where it is None."""

    def run_here(begun: Turn) -> tuple[str, str, Outcome | None]:
        result = carry_out(
            prepare_here(spec, home), RunOptions(home, because=begun.because), as_json
        )
        if result.gate is None:
            return result.run_id, result.status, "success"
        decision = gate_text(result.gate.decision, result.run_id)
        outcome: Outcome = "refusal" if result.gate.decision == "refused" else "success"
        return result.run_id, f"{decision}: {result.gate.reason}", outcome

    def submit(begun: Turn) -> tuple[str, str, Outcome | None]:
        assert platform is not None
        consent = functools.partial(ask_to_submit, yes)
        prepared = prepare_for(platform, spec, home)
        # the turn is the token: a turn that is completed later submits nothing twice
        record, _, _ = submit_prepared(prepared, home, begun.turn, consent, begun.because)
        return (
            record.run_id,
            f"submitted to {platform}",
            None,
        )  # follow.py tells how it ends

    return submit if platform else run_here


def _line(turn: Turn) -> str:
    decision: str = turn.decision
    if decision == "suggested":
        decision = "a run is suggested"
    minute = turn.at[:16].replace("T", " ")
    line = f"{minute} {turn.name}: {decision} because {turn.because}"
    if turn.outcome:
        line += f"; {turn.run_id} {turn.outcome}"
    return line


def _seconds(interval: str) -> float:
    try:
        length = parse_duration(interval)
    except ValueError as error:
        fix = "use a number and a unit, such as `6 hours`"
        raise RequestError(str(error), where="--interval", fix=fix) from None
    return length.seconds + length.months * _DAYS_PER_MONTH * _SECONDS_PER_DAY
