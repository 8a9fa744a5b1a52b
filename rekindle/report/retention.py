"""Which runs of a home stay, and what these need: by age and number, by whether they are alive, and
by what the registry holds of them. Where a record or a registry gives no answer, the run stays."""

import contextlib
import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rekindle import formats
from rekindle.errors import RekindleError, first_line
from rekindle.outputs import HomeItem
from rekindle.platforms.local.removal import NAME, Needs, survey
from rekindle.platforms.local.store import is_alive
from rekindle.platforms.snapshot import ENDED_RUN
from rekindle.records import RunRecord
from rekindle.report.collect import Findings, collect
from rekindle.report.ledger import Entry, ledger
from rekindle.serve.messages import Wanted
from rekindle.spec.model import RetentionSpec
from rekindle.train.job import folder_of

Ask = Callable[[RunRecord], Mapping[str, str]]
AskDigests = Callable[[RunRecord], frozenset[str]]
_NO_RECORD = RunRecord(run_id="", name="", platform="", status="failed", started_at="")


class Retention:
    """What may go from a home by the retention of each name, which `keep_runs` and `days` replace.
    `ask` gives the versions in a run's registry by alias, `digests` the digests of these versions'
    models, or they raise RekindleError."""

    def __init__(
        self,
        home: Path,
        ask: Ask,
        keep_runs: int | None,
        days: int | None,
        digests: AskDigests = lambda record: frozenset(),
    ) -> None:
        self.home, self.ask, self.keep_runs, self.days = home, ask, keep_runs, days
        self.digests, self.served = digests, dict[tuple[str, str], frozenset[str] | None]()
        self.aliases: dict[tuple[str, str], Mapping[str, str] | str] = {}
        self.known: dict[str, tuple[object, RunRecord, Findings, set[str]]] = {}

    def look(self) -> Iterator[HomeItem]:
        """All that a removal looks at, as it is now."""
        found = (path for path in self.home.glob("runs/*") if path.is_dir())
        ids = [path.name for path in found if path.name != ".removed"]
        alive = {run_id for run_id in ids if is_alive(self.home, run_id)}
        runs, days = self._runs(ids, alive)
        used, live, finished, elsewhere = set[str](), set[str](), set[str](), dict[str, str]()
        unsure = False
        for run_id, (stays, _) in runs.items():
            _, findings, names = self._read(run_id)
            used |= names if stays else set()
            live |= names if run_id in alive else set()
            unsure |= run_id in alive and findings.fingerprint is None
            finished |= {findings.training.run_key} if findings.training else set()
        for run_id in runs:
            record, findings, _ = self._read(run_id)
            place = (record.spec.get("platforms") or {}).get(record.platform) or {}
            key = findings.fingerprint.run_key if findings.fingerprint else ""
            if place.get("artifact_root") and key and key not in live:
                folder = folder_of(str(place["artifact_root"]), "checkpoints", key)
                if key in finished or key not in used:
                    why = "its training is finished" if key in finished else "its runs may go"
                    elsewhere[folder] = why
        needs = Needs(
            runs,
            frozenset(used),
            frozenset(live),
            unsure,
            frozenset(finished),
            elsewhere,
            days,
            self._served([*runs]),
        )
        return survey(self.home, needs)

    def _served(self, ids: list[str]) -> frozenset[str] | None:
        """The digests of models that a registry or a deployment names; None where one gives no
        answer. Nothing is asked where no model was fetched."""
        if not any(self.home.glob("fetched/*")):
            return frozenset()
        named = set[str]()
        for file in self.home.glob("deployments/*/local/wanted.json"):
            try:
                wanted = Wanted.read(file.parent)
            except (OSError, ValueError):
                return None
            shadows = [model.shadow for model in wanted.models if model.shadow]
            named |= {model.digest for model in (*wanted.models, *shadows)}
        for run_id in ids:
            record, found, _ = self._read(run_id)
            if found.registration is None:
                continue
            uri = str((record.spec.get("register") or {}).get("tracking_uri"))
            where = (found.registration.name, uri)
            if where not in self.served:
                try:
                    self.served[where] = self.digests(record)
                except (RekindleError, ValueError):
                    self.served[where] = None
            digests = self.served[where]
            if digests is None:
                return None
            named |= digests
        return frozenset(named)

    def _runs(self, ids: list[str], alive: set[str]) -> tuple[dict[str, tuple[bool, str]], int]:
        """Whether each run stays, and why; and the longest time in days for which one may."""
        entries, rules = ledger(self.home).entries, dict[str, RetentionSpec]()
        runs = dict.fromkeys(ids, (True, "it has no record to judge by"))
        runs |= dict.fromkeys(alive, (True, "it is alive"))
        asked = {"keep_runs": self.keep_runs, "older_than_days": self.days}
        asked = {name: value for name, value in asked.items() if value is not None}
        newer, makers = Counter[tuple[str, str]](), set[tuple[str, ...]]()
        for entry in reversed(entries):
            if entry.name not in rules:
                spec = self._read(entry.run_id)[0].spec
                rule = RetentionSpec.model_validate(spec.get("retention") or {})
                rules[entry.name] = rule.model_copy(update=asked)
            newer[entry.name, entry.platform] += 1
            if entry.run_id not in alive:
                count = newer[entry.name, entry.platform]
                runs[entry.run_id] = _by_age(entry, count, rules[entry.name])
        for entry in entries:
            if not runs[entry.run_id][0] and (why := self._registered(entry.run_id, makers)):
                runs[entry.run_id] = True, why
        return runs, max((rule.older_than_days for rule in rules.values()), default=30)

    def _registered(self, run_id: str, makers: set[tuple[str, ...]]) -> str:
        """Why the registry needs the run, or ""; `makers` are the versions of those before it."""
        record, found, _ = self._read(run_id)
        if (model := found.registration) is None:
            return "what it registered cannot be read" if "registration" in found.files else ""
        where = (model.name, str((record.spec.get("register") or {}).get("tracking_uri")))
        if where not in self.aliases:
            try:
                self.aliases[where] = self.ask(record)
            except (RekindleError, ValueError) as error:
                self.aliases[where] = f"its registry gives no answer: {first_line(error)}"
        if isinstance(aliases := self.aliases[where], str):
            return aliases
        held = [alias for alias, version in aliases.items() if version == model.version]
        if held and (*where, model.version) not in makers:
            makers.add((*where, model.version))
            return f"it made the {held[0]} of {model.name}"
        compared = found.evidence.champion_version if found.evidence else ""
        waits = model.decision in ("approval_needed", "pending")
        same = compared == aliases.get("champion", "")
        return "its candidate waits for approval" if waits and same else ""

    def _read(self, run_id: str) -> tuple[RunRecord, Findings, set[str]]:
        """The record of a run, what its steps found, and all names that these mention."""
        files = [self.home / "runs" / run_id / name for name in ("run.json", "uses")]
        stamp = [path.is_file() and tuple(path.stat())[:9] for path in files]
        if run_id not in self.known or self.known[run_id][0] != stamp:
            record = _NO_RECORD
            with contextlib.suppress(OSError, ValueError):
                record = RunRecord.read(files[0])
            found = collect(record, history=False)
            away = found.shards is not None and found.shards.disk_bytes
            files += [path for kind, path in found.files.items() if kind != "shards" or away]
            text = [path.read_text(errors="replace") for path in files if path.is_file()]
            self.known[run_id] = stamp, record, found, set(NAME.findall(" ".join(text)))
        return self.known[run_id][1:]


def _by_age(entry: Entry, count: int, rule: RetentionSpec) -> tuple[bool, str]:
    """Whether a run stays that `count - 1` runs of its name followed, and why."""
    keep, days, began = rule.keep_runs, rule.older_than_days, formats.instant(entry.started_at)
    if entry.platform != "local" and entry.status not in ENDED_RUN:
        return True, f"it is not known to be over on {entry.platform}"
    if count <= keep:
        return True, f"it is one of the {keep} newest of its name"
    if began is None or dt.datetime.now(dt.UTC) - began < dt.timedelta(days=days):
        return True, f"it began less than {days} days ago"
    return False, f"it is older than {days} days, and not one of the {keep} newest of its name"
