"""One look at whether a model has to be retrained, and the run where it has: a turn.

The state is that of the runs under the home, also of those begun by hand. A turn leaves a line in
`watch/NAME.jsonl`. One that acts is written before it does, and once more with what came of it; so
the turn after one that was killed goes on with it: the same run resumes from the cache and its
checkpoints, the same submission is sent once. Turns of one name exclude each other."""

import dataclasses
import datetime as dt
import itertools
import secrets
from collections.abc import Callable
from pathlib import Path

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
from rekindle.report.collect import Findings, collect
from rekindle.report.index import render_index
from rekindle.report.ledger import Entry, ledger, path_of, turns
from rekindle.spec.model import DataSpec, Outcome, Spec
from rekindle.spec.schedule import TriggersSpec

FAILED = "failed"
_UNDECIDED = "it could not be decided"
MOST_BYTES = 4 << 20  # of the turns of a name; the older half goes

# runs what is due: the id of the run, what came of it in words, and for whom to hear
Act = Callable[[Turn], tuple[str, str, Outcome | None]]


def turn(
    spec: Spec, home: Path, act: Act, now: dt.datetime | None = None, platform: str = "local"
) -> Turn:
    """Decide and, where a run is due, `act`; what happened is on record, and told as `notify` asks.
    `now` (UTC) in place of the clock; `platform` is where the model serves. RequestError where the
    config names no data; DataError where they cannot be read; errors of the run are raised."""
    if spec.data is None or not spec.task:
        fix = "set task and data.source; other pipelines are started by `rekindle schedule`"
        raise errors.RequestError("nothing is there to be watched", where="data", fix=fix)
    now = now or dt.datetime.now(dt.UTC)
    begun = Turn(turn=secrets.token_hex(8), at=now.isoformat(timespec="seconds"), name=spec.name)
    path = path_of(home, slug(spec.name))
    make_home(home)
    path.parent.mkdir(exist_ok=True)
    with locked(path.with_suffix(".lock")) as ours:
        if not ours:
            return begun.model_copy(update={"because": "another watch of this name decides now"})
        before = turns(path)
        last = next((one for one in before[::-1] if one.decision == "ran"), None)
        try:
            decided = _decided(spec, spec.data, home, before, last, begun, now, platform)
        except Exception as error:
            is_ours = isinstance(error, errors.RekindleError)
            what = errors.first_line(error, None if is_ours else repr(error))
            undecided = _noted(path, begun, because=f"{_UNDECIDED}: {what}")
            if not before or before[-1].because != undecided.because:
                tell(spec.notify, "failure", f"{spec.name}: {undecided.because}")
            if isinstance(error, errors.RekindleError | OSError):
                raise
            fix = "check data.source, and the network"  # of a store's or a hub's client
            raise errors.DataError(f"the data cannot be read: {what}", fix=fix) from error
        if decided.turn == begun.turn:
            _noted(path, decided)
        if decided.decision == "suggested":
            decided_before = (one for one in before[::-1] if not one.because.startswith(_UNDECIDED))
            if getattr(next(decided_before, None), "decision", "") != "suggested":
                tell(spec.notify, "suggestion", f"{spec.name}: a run is due: {decided.because}")
        return decided if decided.decision != "ran" else _acted(path, spec, decided, last, act)


def _decided(
    spec: Spec,
    data: DataSpec,
    home: Path,
    before: list[Turn],
    last: Turn | None,
    begun: Turn,
    now: dt.datetime,
    platform: str,
) -> Turn:
    """The turn with its decision, or the `last` of those `before` that ran, to be completed."""
    path, triggers = path_of(home, slug(spec.name)), spec.triggers or TriggersSpec()
    if going := _going_on(_known(spec, home), home):
        return begun.model_copy(update={"because": f"{going} goes on"})
    known = _known(spec, home)  # what was asked just now may have ended
    past, found = _past(known, before, home)
    held = arrivals(spec.task, data, found.fingerprint, found.shards)
    if last is not None and (past.because == last.because or not past.has_judged(held)):
        if not last.outcome and triggers.act == "run":
            return last
        failed = last.outcome if last.outcome.startswith(FAILED) else ""
        past = dataclasses.replace(past, failed=failed)
    if last is not None and not last.outcome:
        _noted(path, last, outcome="given up: its data were judged meanwhile, or nothing may run")
    seen = _moved(spec, triggers, home, platform, now) if past.read and triggers.watches else None
    is_due, because = due(triggers, now, held, past, seen)
    acts = "suggested" if triggers.act == "suggest" else "ran"
    if is_due and (doubt := _rolled_back(spec, known, held, home)):
        because, acts = f"{because}, but {doubt}", "suggested"
    update = {"because": because, "window": held.window, "new_rows": held.new}
    return begun.model_copy(update={**update, "decision": acts if is_due else "skipped"})


def _rolled_back(spec: Spec, known: list[Entry], held: Arrivals, home: Path) -> str:
    """Why a person has to start the next run: the newest version that a person rolled back learnt
    from data that are still there, and no person has acted since. "" where none has to."""
    for number, run in enumerate(known):
        if (run.summary["gate"] or {}).get("decision") != "rolled_back":
            continue
        found = collect(read_run(home, run.run_id), history=False)
        registration, read = found.registration, found.fingerprint
        if registration is None:
            continue
        at = formats.instant(registration.tags.get(ROLLED_BACK_BY_HAND, ""))
        if at is None:
            continue
        if any(_is_a_persons(later, at, home) for later in known[:number]):
            return ""
        if read is not None and _have_gone(read.window, held.window):
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
    return run.promoted or not read_run(home, run.run_id).because


def _have_gone(read: str, window: str) -> bool:
    """Whether no row of the window `read` is in the window of now; without windows rows stay."""
    then, now = parse_window(read), parse_window(window)
    return then is not None and now is not None and then.end <= now.start


def _moved(
    spec: Spec, triggers: TriggersSpec, home: Path, platform: str, now: dt.datetime
) -> Moved:
    """What the monitor says; that it can say nothing makes no run due."""
    try:
        return moved(triggers, check(spec, home, platform, now))
    except errors.RekindleError as error:
        return False, f"the monitor cannot tell: {errors.first_line(error)}"


def _acted(path: Path, spec: Spec, begun: Turn, last: Turn | None, act: Act) -> Turn:
    """Act, and tell what came of it, but of two turns in a row that fail alike only once."""
    try:
        run_id, outcome, heard = act(begun)
    except (errors.PreemptedError, errors.InterruptedRunError):
        raise  # the next turn goes on with this one
    except errors.RekindleError as error:
        outcome = f"{FAILED}: {errors.first_line(error)}"
        goes_on = isinstance(error, errors.PlatformError)  # the next turn, with this one
        is_new = last is None or (last.turn != begun.turn if goes_on else last.outcome != outcome)
        if is_new and not isinstance(error, errors.RolledBackError):  # which `deploy` has told
            tell(spec.notify, "failure", f"{spec.name}: {outcome}. It ran because {begun.because}")
        if not goes_on:
            _noted(path, begun, outcome=outcome)
        raise
    if heard is not None:
        why = f"It ran because {begun.because}. Run {run_id}"
        tell(spec.notify, heard, f"{spec.name}: {outcome.rstrip('.')}. {why}")
    return _noted(path, begun, run_id=run_id, outcome=outcome)


def _noted(path: Path, one: Turn, **facts: object) -> Turn:
    """The turn with these facts, on disk."""
    one = one.model_copy(update=facts)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    # not by splitlines: what they say may hold other ends of lines
    lines = [line for line in text.split("\n") if line]
    if len(text) > MOST_BYTES:
        lines = lines[len(lines) // 2 :]
    write_atomically(path, "".join(f"{line}\n" for line in (*lines, one.to_json())))
    render_index(path.parents[1])
    return one


def _known(spec: Spec, home: Path) -> list[Entry]:
    """The runs of the config's name, the newest first."""
    return [entry for entry in ledger(home).entries[::-1] if entry.name == spec.name]


def _going_on(known: list[Entry], home: Path) -> str:
    """The id of a run that has not ended, as its platform says where it has one."""
    newest = next((entry for entry in known if entry.status == "succeeded"), None)
    for entry in known:
        # what the newest left may have been out of reach when it ended
        unread = entry is newest and entry.platform != "local" and not entry.summary["gate"]
        if entry.status == "submitting" or (entry.status in ENDED_RUN and not unread):
            continue
        if entry.platform == "local":
            goes_on = is_alive(home, entry.run_id)
        else:
            goes_on = (
                refresh_from_platform(read_run(home, entry.run_id), home).status not in ENDED_RUN
            )
        if goes_on:
            return entry.run_id
    return ""


def _past(known: list[Entry], before: list[Turn], home: Path) -> tuple[Past, Findings]:
    """What runs came to, and what the last one that was judged left."""
    dated = {one.run_id: one.at for one in before}
    times = {run.run_id: formats.instant(dated.get(run.run_id, run.started_at)) for run in known}
    over = (run for run in known if run.status in ("succeeded", "failed"))
    in_a_row = len([*itertools.takewhile(_is_lost, over)])
    lost = max(in_a_row, _failed(known, before, times, home))
    past = Past(tuple(time for time in times.values() if time), lost=lost)
    ended = (run.summary for run in known if run.status == "succeeded")
    # one training of a grid has no gate: the best of them is judged in a run of its own
    judged = next((run for run in ended if run["gate"] or not run["settings"]), None)
    if judged is None:
        return past, Findings()
    record = read_run(home, judged["run_id"])
    found = collect(record, history=False)
    if found.fingerprint is None or not judged["gate"]:
        what = f"{record.run_id} succeeded without a fingerprint of its data and a gate"
        fix = "keep the steps fingerprint and evaluate, or start it by `rekindle schedule`"
        raise errors.RequestError(f"{what}: nothing tells what is new", where="pipeline", fix=fix)
    return dataclasses.replace(
        past,
        judged=record.run_id,
        judged_at=times[record.run_id],
        because=record.because,
        read=found.fingerprint,
        refused=judged["gate"]["decision"] == "refused",
    ), found


def _is_lost(run: Entry) -> bool:
    return (run.summary["gate"] or {}).get("decision", run.status) in ("refused", "failed")


def _failed(
    known: list[Entry], before: list[Turn], times: dict[str, dt.datetime | None], home: Path
) -> int:
    """How many of the newest turns in a row failed, with no run by hand since that did not."""
    ran = (one for one in before[::-1] if one.decision == "ran")
    failed = itertools.takewhile(lambda one: one.outcome.startswith(FAILED), ran)
    began = [at for one in failed if (at := formats.instant(one.at))]
    good = [
        at
        for run in known
        if began and run.status == "succeeded" and not _is_lost(run)
        if (at := times[run.run_id]) and at > min(began)
        # by hand: a turn whose deployment failed has a run that succeeded, too
        if not read_run(home, run.run_id).because
    ]
    return sum(1 for at in began if not good or at > max(good))
