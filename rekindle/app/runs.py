"""The records of runs under a home: read, found by name, numbered, begun; their cards,
and what was submitted for them."""

import datetime
import logging
import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import rekindle
from rekindle.errors import RequestError, first_line
from rekindle.outputs import Planned
from rekindle.platforms.submission import Definition
from rekindle.records import Ignored, RunRecord, RunSummary
from rekindle.report.collect import collect, summarised
from rekindle.report.ledger import Entry, ledger, record_in
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec, recorded_spec

log = logging.getLogger(__name__)

DEFAULT_HOME = Path(".rekindle")
HOME = "REKINDLE_HOME"  # the variable that names another
DEFINITION = "definition"  # folder of a run with what was submitted
MOST_COMPARED = 20
_MOST_NAMED = 5  # runs in a message


def home_of(named: str | Path | None) -> Path:
    """The home that is named, else that of `REKINDLE_HOME`, else `.rekindle`."""
    return Path(named or os.environ.get(HOME) or DEFAULT_HOME)


def all_runs(home: Path) -> list[RunRecord]:
    """All runs under `home`, the oldest first, without unreadable ones."""
    return list(newest_first(home))[::-1]


def newest_first(home: Path, name: str = "", platform: str = "") -> Iterator[RunRecord]:
    """All runs under `home`, or those of a name, the newest first, those on `platform`
    before all others, read one by one."""
    newest_entries = ledger(home).entries[::-1]
    for entry in sorted(newest_entries, key=lambda entry: entry.platform != platform):
        if name in ("", entry.name):
            try:
                yield read_run(home, entry.run_id)
            except (
                OSError,
                ValueError,
            ) as error:  # removed or damaged since the ledger was read
                log.warning("%s cannot be read: %s", entry.run_id, first_line(error))


def numbered(record: RunRecord, home: Path) -> RunRecord:
    """The record of a run that begins, with a number above all others under `home`."""
    highest = max((entry.number for entry in ledger(home).entries), default=0)
    return record.model_copy(update={"number": highest + 1, "home": str(home.absolute())})


def read_run(home: Path, run_id: str) -> RunRecord:
    """The record of the run with exactly this id."""
    return record_in(home / "runs", run_id)


def find_run(home: Path, wanted: str) -> RunRecord:
    """The run that `wanted` names: `latest`, MODEL@VERSION (the first that came to it),
    an id, or a unique prefix of one; raises RequestError."""
    entries = ledger(home).entries
    ids = [entry.run_id for entry in entries]
    if wanted == "latest" and ids:
        return read_run(home, ids[-1])
    matching_ids = _ids_of(wanted, entries)
    if len(matching_ids) == 1:
        return read_run(home, matching_ids[0])
    if matching_ids:
        newest_ids = matching_ids[::-1]
        names = ", ".join(newest_ids[:_MOST_NAMED])
        if len(newest_ids) > _MOST_NAMED:
            names += ", ..."
        raise RequestError(
            f"`{wanted}` matches {len(matching_ids)} runs, the newest first: {names}",
            fix="use a longer prefix",
        )
    if not ids:
        raise RequestError(
            f"there are no runs under {home}",
            fix="`rekindle run CONFIG`, or name another --home",
        )
    raise RequestError(
        f"there is no run `{wanted}` under {home}",
        fix=f"the latest is {ids[-1]}; `rekindle runs` lists all that `rekindle gc` left",
    )


def _ids_of(wanted: str, entries: Sequence[Entry]) -> list[str]:
    """The ids of runs that `wanted` may name.

    A model's version goes before an id, and that before prefixes."""
    name, _, version = wanted.rpartition("@")
    for entry in entries:
        model = entry.summary["model"] or {}
        if (model.get("name"), model.get("version")) == (name, version):
            return [entry.run_id]
    ids = [entry.run_id for entry in entries]
    exact_ids = [run_id for run_id in ids if run_id == wanted]
    return exact_ids or [run_id for run_id in ids if run_id.startswith(wanted)]


def records_to_compare(home: Path, runs: Sequence[RunRecord | str]) -> list[RunRecord]:
    """The records of runs, by name (see `find_run`) or as they are; RequestError for
    fewer than two, more than `MOST_COMPARED`, or the same one twice."""
    if not 2 <= len(runs) <= MOST_COMPARED:
        count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        raise RequestError(
            f"{count} cannot be compared",
            where="RUN",
            fix=f"name 2 to {MOST_COMPARED} of them; `rekindle runs` lists them",
        )
    records = []
    for run in runs:
        if isinstance(run, RunRecord):
            records.append(run)
        else:
            records.append(find_run(home, run))
    ids = [record.run_id for record in records]
    for run_id in ids:
        if ids.count(run_id) > 1:
            raise RequestError(f"`{run_id}` is named twice", where="RUN", fix="name each run once")
    return records


def load_target_spec(target: str | None, home: Path) -> tuple[Spec, str]:
    """The config behind a MODEL, RUN or CONFIG (None: the latest run), and the version
    that a RUN registered; "" stands for the champion. Raises RequestError."""
    if target is not None and (Path(target).is_file() or target.endswith((".yaml", ".yml"))):
        return load_target(target), ""
    for record in newest_first(home):
        spec = recorded_spec(record.spec)
        if target in (None, spec.model_name):
            return spec, ""
    ids = [entry.run_id for entry in ledger(home).entries]
    is_name = target not in (None, "latest")
    # without any run `find_run` says so
    if ids and is_name and not any(run_id.startswith(str(target)) for run_id in ids):
        raise RequestError(
            f"no config, model or run is called `{target}`",
            where=str(home),
            fix="`rekindle runs` lists them",
        )
    record = find_run(home, target or "latest")
    registration = collect(record, history=False).registration
    if registration is None:
        raise no_model_of(record)
    return recorded_spec(record.spec), registration.version


def no_model_of(record: RunRecord) -> RequestError:
    """The error for a run of which no registration is known."""
    if record.submission and record.submission.unread:
        message = f"what the run {record.run_id} registered could not be read"
        return RequestError(message, fix=record.submission.unread)
    fix = "name a run that did; `rekindle runs` lists them"
    return RequestError(f"the run {record.run_id} registered no model", fix=fix)


def new_record(
    spec: Spec,
    ignored: tuple[Ignored, ...],
    platform: str = "local",
    plan: Planned | None = None,
) -> RunRecord:
    """The record of a run that is about to begin."""
    now = datetime.datetime.now(datetime.UTC)
    config, overrides = spec.origin
    command = ["rekindle", "run"]
    if platform != "local":
        command = ["rekindle", "submit", f"--platform={platform}"]
    command.append(config or "CONFIG")
    command += [f"--set={override}" for override in overrides]
    return RunRecord(
        # the last part is by chance: two runs may begin in one second
        run_id=f"{spec.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        name=spec.name,
        platform=platform,
        status="running",
        started_at=now.isoformat(timespec="milliseconds"),
        config=config,
        command=shlex.join(command),
        spec=spec.model_dump(mode="json"),
        ignored=ignored,
        plan=plan.model_dump(mode="json") if plan else {},
        versions={"rekindle": rekindle.__version__},
    )


def write_card(home: Path, run_id: str) -> None:
    """Write the card of a run, and the index of all."""
    from rekindle.report.card import render_card
    from rekindle.report.index import render_index

    if (home / "runs" / run_id / "run.json").exists():
        render_card(home, read_run(home, run_id))
        render_index(home)


def rewrite_record(record: RunRecord, home: Path) -> None:
    """Write the record of an earlier run once more, and its card and the index, so that
    all lists show what its steps' records say now."""
    try:
        # lists know what they have read by the record's time and inode (report/ledger.py)
        record.write(home / "runs" / record.run_id / "run.json")
        write_card(home, record.run_id)
    except OSError as error:  # what is to be shown has happened all the same
        log.warning("the card and the list could not be written: %s", error.strerror)


def summary(record: RunRecord, home: Path) -> RunSummary:
    """What `run --json` ends with."""
    return summarised(record, card=str(home.resolve() / "runs" / record.run_id / "card.html"))


def sent_definition(record: RunRecord, home: Path) -> Definition:
    """What was submitted, from the run's folder; RequestError where that is lost."""
    folder = home / "runs" / record.run_id / DEFINITION
    files = files_in(folder)
    if not files:
        raise RequestError(
            f"what was submitted as {record.run_id} is not in {folder}",
            fix=f"submit it again: {record.command}",
        )
    return Definition(files)


def files_in(folder: Path) -> dict[str, bytes]:
    """The files below the folder, by their paths in it."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def last_sent(name: str, platform: str, home: Path) -> Path:
    """The folder with what was submitted last to the platform.

    RequestError if nothing was."""
    for record in newest_first(home):
        folder = home / "runs" / record.run_id / DEFINITION
        if (record.platform, record.name) == (platform, name) and folder.is_dir():
            return folder
    raise RequestError(
        f"nothing of {name} was submitted to {platform} from {home}",
        where="--against",
        fix="name a folder that `rekindle compile` wrote",
    )
