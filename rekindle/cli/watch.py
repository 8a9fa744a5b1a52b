"""`rekindle watch CONFIG`: retrains when the data say so, and says why or why not."""

import functools
import logging
import time
from pathlib import Path

import click

from rekindle.app.run import Options, windows
from rekindle.app.submit import submit_spec
from rekindle.app.watch import Act, turn
from rekindle.cli.options import Overrides, moment, of_config, platform, shared, tell, yes
from rekindle.cli.run import WORDS, carry_out
from rekindle.cli.submit import agreed
from rekindle.data.window import parse_duration
from rekindle.errors import InterruptedRunError, PreemptedError, RekindleError, RequestError
from rekindle.records import Turn
from rekindle.spec.load import load_target
from rekindle.spec.model import Outcome, Spec

log = logging.getLogger(__name__)

SUGGESTED = 3


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

    Each look ends with one line, `ran because ...` or `skipped because ...`, which is kept under
    the home. Without `triggers`, changed data make it due. A look that was killed is completed by
    the next one. CONFIG is read again each time.

    Exit codes with --once: 0 ran or skipped, 3 a run is due and `act: suggest` keeps it from
    starting, else those of `rekindle run` or `submit`."""
    pause, at = _seconds(interval), moment(now)
    first = True
    while True:
        try:
            spec = windows(load_target(config, overrides))[-1]
            act = _act(spec, platform, home, yes, as_json)
            done = turn(spec, home, act, at, platform or "local")
        except (RekindleError, OSError) as error:
            if once or first or isinstance(error, PreemptedError | InterruptedRunError):
                raise
            log.warning("%s: %s\nthe next look is in %s", config, error, interval)
        else:
            tell(done, _line(done), as_json)
            if once:
                return SUGGESTED if done.decision == "suggested" else 0
        first = False
        time.sleep(pause)


def _act(spec: Spec, platform: str | None, home: Path, yes: bool, as_json: bool) -> Act:
    def here(begun: Turn) -> tuple[str, str, Outcome | None]:
        result = carry_out(spec, Options(home, because=begun.because), as_json)
        if result.gate is None:
            return result.run_id, result.status, "success"
        words = WORDS[result.gate.decision].format(run=result.run_id)
        heard: Outcome = "refusal" if result.gate.decision == "refused" else "success"
        return result.run_id, f"{words}: {result.gate.reason}", heard

    def there(begun: Turn) -> tuple[str, str, Outcome | None]:
        assert platform is not None
        consent = functools.partial(agreed, yes)
        record, _, _ = submit_spec(spec, platform, home, begun.turn, consent, begun.because)
        return record.run_id, f"submitted to {platform}", None  # follow.py tells how it ends

    return there if platform else here


def _line(done: Turn) -> str:
    words = {"suggested": "a run is suggested"}.get(done.decision, done.decision)
    outcome = f"; {done.run_id} {done.outcome}" if done.outcome else ""
    return f"{done.at[:16].replace('T', ' ')} {done.name}: {words} because {done.because}{outcome}"


def _seconds(interval: str) -> float:
    try:
        length = parse_duration(interval)
    except ValueError as error:
        fix = "use a number and a unit, such as `6 hours`"
        raise RequestError(str(error), where="--interval", fix=fix) from None
    return length.seconds + length.months * 30.4375 * 86_400.0
