"""The records of runs under a home: read, found by name, numbered, begun; their cards, and what was
submitted for them."""

import datetime
import itertools
import logging
import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import rekindle
from rekindle.errors import RequestError, first_line
from rekindle.outputs import Planned
from rekindle.platforms.submission import Definition, problems_in
from rekindle.records import Ignored, RunRecord, RunSummary
from rekindle.report.collect import collect, summarised
from rekindle.report.ledger import ledger, record_in
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec

log = logging.getLogger(__name__)

DEFAULT_HOME = Path(".rekindle")
HOME = "REKINDLE_HOME"  # the variable that names another
DEFINITION = "definition"  # folder of a run with what was submitted
MOST_COMPARED = 20
_problem = problems_in(__file__)


def home_of(named: str | Path | None) -> Path:
    """The home that is named, else that of `REKINDLE_HOME`, else `.rekindle`."""
    return Path(named or os.environ.get(HOME) or DEFAULT_HOME)


def all_runs(home: Path) -> list[RunRecord]:
    """All runs under `home`, the oldest first, without unreadable ones."""
    return list(newest_first(home))[::-1]


def newest_first(home: Path, name: str = "", platform: str = "") -> Iterator[RunRecord]:
    """All runs under `home`, or those of a name, the newest first, those on `platform` before all
    others, read one by one."""
    entries = ledger(home).entries[::-1]
    for entry in sorted(entries, key=lambda entry: entry.platform != platform):
        if name in ("", entry.name):
            try:
                yield read_run(home, entry.run_id)
            except (OSError, ValueError) as error:  # since a moment ago
                log.warning("%s cannot be read: %s", entry.run_id, first_line(error))


def numbered(record: RunRecord, home: Path) -> RunRecord:
    """The record of a run that begins, with a number above all others under `home`."""
    number = 1 + max((entry.number for entry in ledger(home).entries), default=0)
    return record.model_copy(update={"number": number, "home": str(home.absolute())})


def read_run(home: Path, run_id: str) -> RunRecord:
    """The record of the run with exactly this id."""
    return record_in(home / "runs", run_id)


def find_run(home: Path, wanted: str) -> RunRecord:
    """The run whose id is `wanted`, starts with it, or is the latest, or the first one that came to
    MODEL@VERSION; raises RequestError."""
    entries, (name, _, version) = ledger(home).entries, wanted.rpartition("@")
    ids = [entry.run_id for entry in entries]
    models = [entry.summary["model"] or {} for entry in entries]
    if wanted == "latest" and ids:
        return read_run(home, ids[-1])
    made = [(one.get("name"), one.get("version")) == (name, version) for one in models]
    found = [*itertools.compress(ids, made)][:1] or [run_id for run_id in ids if run_id == wanted]
    found = found or [run_id for run_id in ids if run_id.startswith(wanted)]
    if len(found) == 1:
        return read_run(home, found[0])
    if found:
        names = ", ".join(found[:-6:-1]) + (", ..." if len(found) > 5 else "")
        raise RequestError([_problem("ambiguous", wanted=wanted, count=len(found), names=names)])
    if not ids:
        raise RequestError([_problem("none", home=home)])
    raise RequestError([_problem("unknown", wanted=wanted, home=home, latest=ids[-1])])


def records_to_compare(home: Path, wanted: Sequence[RunRecord | str]) -> list[RunRecord]:
    """The records of runs, by name (see `find_run`) or as they are; RequestError for fewer than
    two, more than `MOST_COMPARED`, or the same one twice."""
    if not 2 <= len(wanted) <= MOST_COMPARED:
        several = f"{len(wanted)} run{'' if len(wanted) == 1 else 's'}"
        raise RequestError([_problem("too_few_or_many", runs=several, most=MOST_COMPARED)])
    records = [one if isinstance(one, RunRecord) else find_run(home, one) for one in wanted]
    ids = [record.run_id for record in records]
    if twice := [run_id for run_id in ids if ids.count(run_id) > 1]:
        raise RequestError([_problem("twice", run=twice[0])])
    return records


def load_target_spec(target: str | None, home: Path) -> tuple[Spec, str]:
    """The config behind a MODEL, RUN or CONFIG (None: the latest run), and the version that a RUN
    registered; "" stands for the champion. Raises RequestError."""
    if target is not None and (Path(target).is_file() or target.endswith((".yaml", ".yml"))):
        return load_target(target), ""
    for record in newest_first(home):
        spec = Spec.model_validate(record.spec)
        if target in (None, spec.model_name):
            return spec, ""
    known = [entry.run_id for entry in ledger(home).entries]
    if known and target not in (None, "latest") and not any(i.startswith(target) for i in known):
        raise RequestError([_problem("no_target", where=str(home), target=target)])
    record = find_run(home, target or "latest")
    registered = collect(record, history=False).registration
    if registered is None:
        raise RequestError([_problem("no_model", run=record.run_id)])
    return Spec.model_validate(record.spec), registered.version


def new_record(
    spec: Spec, ignored: tuple[Ignored, ...], platform: str = "local", plan: Planned | None = None
) -> RunRecord:
    """The record of a run that is about to begin."""
    now = datetime.datetime.now(datetime.UTC)
    config, overrides = spec.origin
    verb = ["run"] if platform == "local" else ["submit", f"--platform={platform}"]
    words = ["rekindle", *verb, config or "CONFIG", *(f"--set={text}" for text in overrides)]
    return RunRecord(
        run_id=f"{spec.name}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}",
        name=spec.name,
        platform=platform,
        status="running",
        started_at=now.isoformat(timespec="milliseconds"),
        config=config,
        command=shlex.join(words),
        spec=spec.model_dump(mode="json"),
        ignored=ignored,
        plan=plan.model_dump(mode="json") if plan else {},
        versions={"rekindle": rekindle.__version__},
    )


def write_card(home: Path, run_id: str) -> None:
    """The card of a run, and the index of all."""
    from rekindle.report.card import render_card
    from rekindle.report.index import render_index

    if (home / "runs" / run_id / "run.json").exists():
        render_card(home, read_run(home, run_id))
        render_index(home)


def rewrite_record(record: RunRecord, home: Path) -> None:
    """What a run of before came to has changed: lists, its card and the index show it."""
    try:
        # lists know what they have read by the record's time and inode (report/ledger.py)
        record.write(home / "runs" / record.run_id / "run.json")
        write_card(home, record.run_id)
    except OSError as error:  # it has happened all the same
        log.warning("the card and the list could not be written: %s", error.strerror)


def summary(record: RunRecord, home: Path) -> RunSummary:
    """What `run --json` ends with."""
    return summarised(record, card=str(home.resolve() / "runs" / record.run_id / "card.html"))


def sent_definition(record: RunRecord, home: Path) -> Definition:
    """What was submitted, from the run's folder; RequestError where that is lost."""
    folder = home / "runs" / record.run_id / DEFINITION
    if not (files := files_in(folder)):
        raise RequestError([_problem("lost", record=record, folder=folder)])
    return Definition(files)


def files_in(folder: Path) -> dict[str, bytes]:
    """The files below the folder, by their paths in it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def last_sent(name: str, platform: str, home: Path) -> Path:
    """The folder with what was submitted last to the platform; RequestError if nothing was."""
    for record in newest_first(home):
        folder = home / "runs" / record.run_id / DEFINITION
        if (record.platform, record.name) == (platform, name) and folder.is_dir():
            return folder
    raise RequestError([_problem("nothing_sent", name=name, platform=platform, home=home)])
