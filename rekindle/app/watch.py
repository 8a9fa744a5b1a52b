"""One look at whether a model has to be retrained, and the run where it has: a turn.

The state is that of the runs under the home, also of those begun by hand. A turn leaves a
line in `watch/NAME.jsonl`. One that acts is written before it does, and once more with
what came of it; so the turn after one that was killed goes on with it: the same run
resumes from the cache and its checkpoints, the same submission is sent once. Turns of one
name exclude each other."""

import dataclasses
import datetime as dt
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rekindle import errors, formats
from rekindle.app.follow import refresh_from_platform
from rekindle.app.monitor import check
from rekindle.app.notify import tell
from rekindle.app.runs import read_run
from rekindle.app.triggers import Moved, Past, due, moved
from rekindle.data.arrivals import Arrivals, arrivals
from rekindle.data.window import parse_window
from rekindle.platforms.local.store import is_alive, locked, make_home, slug
from rekindle.platforms.snapshot import ENDED_RUN
from rekindle.records import ROLLED_BACK_BY_HAND, Turn, write_atomically
from rekindle.report.collect import RunFindings, collect
from rekindle.report.index import render_index
from rekindle.report.ledger import Entry, ledger, path_of, turns
from rekindle.spec.model import DataSpec, Outcome, Spec
from rekindle.spec.schedule import TriggersSpec

Decision = Literal["ran", "skipped", "suggested"]
FAILED = "failed"
_UNDECIDED = "it could not be decided"
MOST_BYTES = 4 << 20  # of the turns of a name; the older half goes

# runs what is due: the id of the run, its outcome in words, and the kind of outcome to notify of
Act = Callable[[Turn], tuple[str, str, Outcome | None]]


def turn(
    spec: Spec,
    home: Path,
    act: Act,
    now: dt.datetime | None = None,
    platform: str = "local",
) -> Turn:
    """Decide whether a run is due, and `act` where it is; returns what was recorded.

    What happened is told as `notify` asks. `now` (UTC) stands for the clock; `platform`
    is where the model serves. RequestError where the config names no data; DataError
    where they cannot be read; errors of the run are raised."""
    if spec.data is None or not spec.task:
        fix = "set task and data.source; other pipelines are started by `rekindle schedule`"
        raise errors.RequestError("nothing is there to be watched", where="data", fix=fix)
    now = now or dt.datetime.now(dt.UTC)
    begun = Turn(turn=secrets.token_hex(8), at=now.isoformat(timespec="seconds"), name=spec.name)
    path = path_of(home, slug(spec.name))
    make_home(home)
    path.parent.mkdir(exist_ok=True)
    # a watch may be started twice, and by hand beside a service
    with locked(path.with_suffix(".lock")) as is_ours:
        if not is_ours:
            return begun.model_copy(update={"because": "another watch of this name decides now"})
        earlier = turns(path)
        last_run = next((each for each in reversed(earlier) if each.decision == "ran"), None)
        try:
            decided = _decide(spec, spec.data, home, earlier, last_run, begun, now, platform)
        except Exception as error:
            _note_undecided(path, spec, begun, earlier, error)
            if isinstance(error, errors.RekindleError | OSError):
                raise
            # of a store's or a hub's client
            message = errors.first_line(error, repr(error))
            fix = "check data.source, and the network"
            raise errors.DataError(f"the data cannot be read: {message}", fix=fix) from error
        if decided.turn == begun.turn:  # else it is on record already
            _note(path, decided)
        if decided.decision == "suggested":
            _tell_suggestion(spec, decided, earlier)
        if decided.decision != "ran":
            return decided
        return _act(path, spec, decided, last_run, act)


def _note_undecided(
    path: Path, spec: Spec, begun: Turn, earlier: list[Turn], error: Exception
) -> None:
    """Record that a turn could not be decided, and tell it once for turns in a row."""
    message = errors.first_line(error)
    if not isinstance(error, errors.RekindleError):
        message = errors.first_line(error, repr(error))  # with its type
    undecided = _note(path, begun, because=f"{_UNDECIDED}: {message}")
    if not earlier or earlier[-1].because != undecided.because:
        tell(spec.notify, "failure", f"{spec.name}: {undecided.because}")


def _tell_suggestion(spec: Spec, decided: Turn, earlier: list[Turn]) -> None:
    """Tell that a run is due, unless the last turn that was decided suggested it."""
    for each in reversed(earlier):
        if each.because.startswith(_UNDECIDED):
            continue
        if each.decision == "suggested":
            return
        break
    tell(spec.notify, "suggestion", f"{spec.name}: a run is due: {decided.because}")


def _decide(
    spec: Spec,
    data: DataSpec,
    home: Path,
    earlier: list[Turn],
    last_run: Turn | None,
    begun: Turn,
    now: dt.datetime,
    platform: str,
) -> Turn:
    """The turn with its decision, or the `last_run`, to be completed."""
    path = path_of(home, slug(spec.name))
    triggers = spec.triggers or TriggersSpec()
    unfinished_run = _unfinished_run(_runs_of(spec, home), home)
    if unfinished_run:
        return begun.model_copy(update={"because": f"{unfinished_run} goes on"})
    runs = _runs_of(spec, home)  # what was asked just now may have ended
    # the last judged run is the state, also one that a person started
    past, findings = _past(runs, earlier, home)
    arrived = arrivals(spec.task, data, findings.fingerprint, findings.shards)
    if last_run is not None:
        if past.because == last_run.because or not past.has_judged(arrived):
            if not last_run.outcome and triggers.act == "run":
                # a turn that was killed: the same run resumes, or is submitted once
                return last_run
            failed = last_run.outcome if last_run.outcome.startswith(FAILED) else ""
            past = dataclasses.replace(past, failed=failed)
        if not last_run.outcome:
            outcome = "given up: its data were judged meanwhile, or nothing may run"
            _note(path, last_run, outcome=outcome)
    monitor_verdict = None
    if past.read and triggers.watches:
        monitor_verdict = _monitor_verdict(spec, triggers, home, platform, now)
    is_due, because = due(triggers, now, arrived, past, monitor_verdict)
    decision: Decision = "skipped"
    if is_due:
        decision = "suggested" if triggers.act == "suggest" else "ran"
        doubt = _doubt_after_roll_back(spec, runs, arrived, home)
        if doubt:
            decision = "suggested"
            because = f"{because}, but {doubt}"
    return begun.model_copy(
        update={
            "because": because,
            "window": arrived.window,
            "new_rows": arrived.new,
            "decision": decision,
        }
    )


def _doubt_after_roll_back(spec: Spec, runs: list[Entry], arrived: Arrivals, home: Path) -> str:
    """Why a person has to start the next run: the newest version that a person rolled
    back learnt from data that are still there, and no person has acted since. "" where
    none has to."""
    for number, run in enumerate(runs):
        gate = run.summary["gate"] or {}
        if gate.get("decision") != "rolled_back":
            continue
        findings = collect(read_run(home, run.run_id), history=False)
        registration = findings.registration
        if registration is None:
            continue
        rolled_back_at = formats.instant(registration.tags.get(ROLLED_BACK_BY_HAND, ""))
        if rolled_back_at is None:
            continue
        later_runs = runs[:number]
        if any(_is_a_persons(later, rolled_back_at, home) for later in later_runs):
            return ""
        fingerprint = findings.fingerprint
        if fingerprint is not None and _have_gone(fingerprint.window, arrived.window):
            return ""
        reason = registration.tags.get("rolled_back_for", "").rstrip(".")
        config = spec.origin[0] or "CONFIG"
        return (
            f"version {registration.version} was rolled back: {reason}. The data that it learnt"
            " from are still among the data: correct or remove what was wrong, then start the next"
            f" run by hand, `rekindle run {config}`"
        )
    return ""


def _is_a_persons(run: Entry, since: dt.datetime, home: Path) -> bool:
    """Whether a person's run was judged, or a candidate promoted, since a roll back."""
    began = formats.instant(run.started_at)
    if began is None or began < since or not run.summary["gate"]:
        return False
    # a run that a watch started records why
    return run.promoted or not read_run(home, run.run_id).because


def _have_gone(window_then: str, window_now: str) -> bool:
    """Whether no row of one window is in the later one; without windows rows stay."""
    then = parse_window(window_then)
    now = parse_window(window_now)
    if then is None or now is None:
        return False
    return then.end <= now.start


def _monitor_verdict(
    spec: Spec, triggers: TriggersSpec, home: Path, platform: str, now: dt.datetime
) -> Moved:
    """Whether the monitor makes a run due, and why; none is due where it cannot tell."""
    try:
        return moved(triggers, check(spec, home, platform, now))
    except errors.RekindleError as error:
        return False, f"the monitor cannot tell: {errors.first_line(error)}"


def _act(path: Path, spec: Spec, begun: Turn, last_run: Turn | None, act: Act) -> Turn:
    """Act, and tell the outcome, but of two turns in a row that fail alike only once."""
    try:
        run_id, outcome, outcome_kind = act(begun)
    except (errors.PreemptedError, errors.InterruptedRunError):
        raise  # the next turn goes on with this one
    except errors.RekindleError as error:
        outcome = f"{FAILED}: {errors.first_line(error)}"
        is_continued = isinstance(error, errors.PlatformError)  # by the next turn
        if last_run is None:
            is_new = True
        elif is_continued:
            is_new = last_run.turn != begun.turn
        else:
            is_new = last_run.outcome != outcome
        if is_new and not isinstance(error, errors.RolledBackError):  # which `deploy` has told
            because = f"It ran because {begun.because}"
            tell(spec.notify, "failure", f"{spec.name}: {outcome}. {because}")
        if not is_continued:
            _note(path, begun, outcome=outcome)
        raise
    if outcome_kind is not None:
        because = f"It ran because {begun.because}. Run {run_id}"
        tell(spec.notify, outcome_kind, f"{spec.name}: {outcome.rstrip('.')}. {because}")
    return _note(path, begun, run_id=run_id, outcome=outcome)


def _note(path: Path, noted: Turn, **facts: object) -> Turn:
    """Append the turn with these facts to the file of its name; returns it."""
    noted = noted.model_copy(update=facts)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    # not by splitlines: texts in a turn may hold other ends of lines
    lines = [line for line in text.split("\n") if line]
    if len(text) > MOST_BYTES:
        lines = lines[len(lines) // 2 :]
    write_atomically(path, "".join(f"{line}\n" for line in (*lines, noted.to_json())))
    render_index(path.parents[1])
    return noted


def _runs_of(spec: Spec, home: Path) -> list[Entry]:
    """The runs of the config's name, the newest first."""
    return [entry for entry in ledger(home).entries[::-1] if entry.name == spec.name]


def _unfinished_run(runs: list[Entry], home: Path) -> str:
    """The id of a run that has not ended, as its platform says; "" for none."""
    newest = next((run for run in runs if run.status == "succeeded"), None)
    for run in runs:
        if run.status == "submitting":
            continue
        # what the newest left may have been out of reach when it ended
        is_unread = run is newest and run.platform != "local" and not run.summary["gate"]
        if run.status in ENDED_RUN and not is_unread:
            continue
        if run.platform == "local":
            goes_on = is_alive(home, run.run_id)
        else:
            record = refresh_from_platform(read_run(home, run.run_id), home)
            goes_on = record.status not in ENDED_RUN
        if goes_on:
            return run.run_id
    return ""


def _past(runs: list[Entry], earlier: list[Turn], home: Path) -> tuple[Past, RunFindings]:
    """How earlier runs ended, and what the last one that was judged left."""
    # a turn may have been dated by --now
    dates = {each.run_id: each.at for each in earlier}
    times = {run.run_id: formats.instant(dates.get(run.run_id, run.started_at)) for run in runs}
    lost = max(_lost_in_a_row(runs), _failed_turns(runs, earlier, times, home))
    past = Past(tuple(time for time in times.values() if time), lost=lost)
    judged = _last_judged(runs)
    if judged is None:
        return past, RunFindings()
    record = read_run(home, judged["run_id"])
    findings = collect(record, history=False)
    if findings.fingerprint is None or not judged["gate"]:
        raise errors.RequestError(
            f"{record.run_id} succeeded without a fingerprint of its data and a gate: nothing "
            "tells what is new",
            where="pipeline",
            fix="keep the steps fingerprint and evaluate, or start it by `rekindle schedule`",
        )
    past = dataclasses.replace(
        past,
        judged=record.run_id,
        judged_at=times[record.run_id],
        because=record.because,
        read=findings.fingerprint,
        refused=judged["gate"]["decision"] == "refused",
    )
    return past, findings


def _last_judged(runs: list[Entry]) -> Mapping[str, Any] | None:
    """The summary of the newest run that succeeded and was to be judged."""
    for run in runs:
        if run.status != "succeeded":
            continue
        summary = run.summary
        # one training of a grid has no gate: the best of them is judged in a run of its own
        if summary["gate"] or not summary["settings"]:
            return summary
    return None


def _is_lost(run: Entry) -> bool:
    """Whether a run was refused, or failed."""
    gate = run.summary["gate"] or {}
    return gate.get("decision", run.status) in ("refused", "failed")


def _lost_in_a_row(runs: list[Entry]) -> int:
    """How many of the newest runs that ended were refused or failed."""
    count = 0
    for run in runs:
        if run.status not in ("succeeded", "failed"):
            continue
        if not _is_lost(run):
            break
        count += 1
    return count


def _failed_turns(
    runs: list[Entry],
    earlier: list[Turn],
    times: dict[str, dt.datetime | None],
    home: Path,
) -> int:
    """How many of the newest turns in a row failed.

    None where a run by hand has succeeded since."""
    failed_at = _times_of_failed(earlier)
    if not failed_at:
        return 0
    succeeded_at: list[dt.datetime] = []
    for run in runs:
        time = times[run.run_id]
        if run.status != "succeeded" or _is_lost(run):
            continue
        if time is None or time <= min(failed_at):
            continue
        # by hand: a turn whose deployment failed has a run that succeeded, too
        if not read_run(home, run.run_id).because:
            succeeded_at.append(time)
    if not succeeded_at:
        return len(failed_at)
    return sum(at > max(succeeded_at) for at in failed_at)


def _times_of_failed(earlier: list[Turn]) -> list[dt.datetime]:
    """When the newest turns in a row that failed were begun."""
    times: list[dt.datetime] = []
    for each in reversed(earlier):
        if each.decision != "ran":
            continue
        if not each.outcome.startswith(FAILED):
            break
        at = formats.instant(each.at)
        if at is not None:
            times.append(at)
    return times
