"""Which runs of a home stay, and what these need: by age and number, by whether they are
alive, and by what the registry holds of them. Where a record or a registry gives no
answer, the run stays."""

import contextlib
import datetime as dt
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rekindle import formats
from rekindle.errors import RekindleError, first_line
from rekindle.outputs import HomeItem
from rekindle.platforms.local.removal import NAME, HomeNeeds, survey
from rekindle.platforms.local.store import is_alive
from rekindle.platforms.snapshot import ENDED_RUN
from rekindle.records import Registration, RunRecord
from rekindle.report.collect import RunFindings, collect
from rekindle.report.ledger import Entry, ledger
from rekindle.serve.messages import Wanted
from rekindle.spec.model import RetentionSpec
from rekindle.train.job import folder_of

Ask = Callable[[RunRecord], Mapping[str, str]]
AskDigests = Callable[[RunRecord], frozenset[str]]
Place = tuple[str, str]  # the name of a model, and the URI of its registry
# of a run whose record cannot be read: nothing in it asks for anything
_NO_RECORD = RunRecord(run_id="", name="", platform="", status="failed", started_at="")


class _ReadRun(NamedTuple):
    """What was read of a run, all names that its files mention,
    and when these were written."""

    stamp: object
    record: RunRecord
    findings: RunFindings
    names: set[str]


class Retention:
    """What may go from a home by the retention of each name, which `keep_runs` and `days`
    replace. `ask` gives the versions in a run's registry by alias, `digests` the digests
    of these versions' models, or they raise RekindleError."""

    def __init__(
        self,
        home: Path,
        ask: Ask,
        keep_runs: int | None,
        days: int | None,
        digests: AskDigests = lambda record: frozenset(),
    ) -> None:
        self.home = home
        self.ask = ask
        self.keep_runs = keep_runs
        self.days = days
        self.digests = digests
        # what registries answered, each of which is asked once: digests by model, None
        # for no answer; versions by alias, or why there is no answer
        self.served: dict[Place, frozenset[str] | None] = {}
        self.aliases: dict[Place, Mapping[str, str] | str] = {}
        self.read: dict[str, _ReadRun] = {}

    def look(self) -> Iterator[HomeItem]:
        """All that a removal looks at, as it is now."""
        ids = []
        for path in self.home.glob("runs/*"):
            if path.is_dir() and path.name != ".removed":
                ids.append(path.name)
        alive = {run_id for run_id in ids if is_alive(self.home, run_id)}
        runs, days = self._runs(ids, alive)
        used: set[str] = set()
        live: set[str] = set()
        finished: set[str] = set()
        unsure = False
        for run_id, (stays, _) in runs.items():
            run = self._read(run_id)
            if stays:
                used |= run.names
            if run_id in alive:
                live |= run.names
                if run.findings.fingerprint is None:
                    unsure = True
            if run.findings.training:
                finished.add(run.findings.training.run_key)
        needs = HomeNeeds(
            runs=runs,
            used=frozenset(used),
            live=frozenset(live),
            unsure=unsure,
            finished=frozenset(finished),
            elsewhere=self._checkpoints_elsewhere(runs, used, live, finished),
            days=days,
            served=self._served_digests([*runs]),
        )
        return survey(self.home, needs)

    def _checkpoints_elsewhere(
        self, run_ids: Iterable[str], used: set[str], live: set[str], finished: set[str]
    ) -> dict[str, str]:
        """Folders of checkpoints on platforms that may go, and why."""
        folders = {}
        for run_id in run_ids:
            run = self._read(run_id)
            platform = (run.record.spec.get("platforms") or {}).get(run.record.platform) or {}
            key = run.findings.fingerprint.run_key if run.findings.fingerprint else ""
            if not platform.get("artifact_root") or not key or key in live:
                continue
            folder = folder_of(str(platform["artifact_root"]), "checkpoints", key)
            if key in finished:
                folders[folder] = "its training is finished"
            elif key not in used:
                folders[folder] = "its runs may go"
        return folders

    def _served_digests(self, ids: list[str]) -> frozenset[str] | None:
        """The digests of models that a registry or a deployment names; None where one
        gives no answer. Nothing is asked where no model was fetched."""
        # a registry may be far away, or down
        if not any(self.home.glob("fetched/*")):
            return frozenset()
        served = _deployed_digests(self.home)
        if served is None:
            return None
        for run_id in ids:
            run = self._read(run_id)
            if run.findings.registration is None:
                continue
            registry = _registry_place(run.record, run.findings.registration)
            if registry not in self.served:
                try:
                    self.served[registry] = self.digests(run.record)
                except (RekindleError, ValueError):
                    self.served[registry] = None
            digests = self.served[registry]
            if digests is None:
                return None
            served |= digests
        return frozenset(served)

    def _runs(self, ids: list[str], alive: set[str]) -> tuple[dict[str, tuple[bool, str]], int]:
        """Whether each run stays, and why;
        and the longest time in days for which one may."""
        entries = ledger(self.home).entries
        runs = dict.fromkeys(ids, (True, "it has no record to judge by"))
        runs |= dict.fromkeys(alive, (True, "it is alive"))
        rules: dict[str, RetentionSpec] = {}
        # runs of a name on a platform, this one and newer ones
        counts = Counter[tuple[str, str]]()
        for entry in reversed(entries):
            if entry.name not in rules:  # the newest run of a name says what its rules are
                rules[entry.name] = self._rule(self._read(entry.run_id).record)
            counts[entry.name, entry.platform] += 1
            if entry.run_id not in alive:
                count = counts[entry.name, entry.platform]
                runs[entry.run_id] = _by_age(entry, count, rules[entry.name])
        makers: set[tuple[str, ...]] = set()
        for entry in entries:
            stays, _ = runs[entry.run_id]
            if not stays:
                why = self._why_registered(entry.run_id, makers)
                if why:
                    runs[entry.run_id] = True, why
        return runs, max((rule.older_than_days for rule in rules.values()), default=30)

    def _rule(self, record: RunRecord) -> RetentionSpec:
        """The retention of a run's config, with what replaces it."""
        replaced = {}
        if self.keep_runs is not None:
            replaced["keep_runs"] = self.keep_runs
        if self.days is not None:
            replaced["older_than_days"] = self.days
        rule = RetentionSpec.model_validate(record.spec.get("retention") or {})
        return rule.model_copy(update=replaced)

    def _why_registered(self, run_id: str, makers: set[tuple[str, ...]]) -> str:
        """Why the registry needs the run, or "";
        `makers` are the versions of those before it."""
        run = self._read(run_id)
        model = run.findings.registration
        if model is None:
            if "registration" in run.findings.files:
                return "what it registered cannot be read"
            return ""
        registry = _registry_place(run.record, model)
        if registry not in self.aliases:
            try:
                self.aliases[registry] = self.ask(run.record)
            except (RekindleError, ValueError) as error:
                self.aliases[registry] = f"its registry gives no answer: {first_line(error)}"
        aliases = self.aliases[registry]
        if isinstance(aliases, str):
            return aliases
        own_aliases = [alias for alias, version in aliases.items() if version == model.version]
        # a run that repeated the same work names the version that an earlier one made
        if own_aliases and (*registry, model.version) not in makers:
            makers.add((*registry, model.version))
            return f"it made the {own_aliases[0]} of {model.name}"
        if model.decision not in ("approval_needed", "pending"):
            return ""
        # a candidate waits in vain once it was compared with a champion that is none any
        # more
        compared_with = run.findings.evidence.champion_version if run.findings.evidence else ""
        if compared_with == aliases.get("champion", ""):
            return "its candidate waits for approval"
        return ""

    def _read(self, run_id: str) -> _ReadRun:
        """What a run recorded, read again only where its record has changed."""
        folder = self.home / "runs" / run_id
        files = [folder / "run.json", folder / "uses"]
        stamp = [path.is_file() and tuple(path.stat())[:9] for path in files]
        run = self.read.get(run_id)
        if run is not None and run.stamp == stamp:
            return run
        record = _NO_RECORD
        with contextlib.suppress(OSError, ValueError):
            record = RunRecord.read(files[0])
        findings = collect(record, history=False)
        keeps_shards = findings.shards is not None and findings.shards.disk_bytes
        # a manifest names pieces of the store only where its shards stay there
        for kind, path in findings.files.items():
            if kind != "shards" or keeps_shards:
                files.append(path)
        texts = [path.read_text(errors="replace") for path in files if path.is_file()]
        run = _ReadRun(stamp, record, findings, set(NAME.findall(" ".join(texts))))
        self.read[run_id] = run
        return run


def _deployed_digests(home: Path) -> set[str] | None:
    """The digests of models that deployments here serve;
    None where one cannot be read."""
    digests = set()
    for file in home.glob("deployments/*/local/wanted.json"):
        try:
            deployment = Wanted.read(file.parent)
        except (OSError, ValueError):
            return None  # what it serves is not known, so all has to stay
        for model in deployment.models:
            digests.add(model.digest)
            if model.shadow:
                digests.add(model.shadow.digest)
    return digests


def _registry_place(record: RunRecord, model: Registration) -> Place:
    """The model's name and the registry that has it."""
    return model.name, str((record.spec.get("register") or {}).get("tracking_uri"))


def _by_age(entry: Entry, count: int, rule: RetentionSpec) -> tuple[bool, str]:
    """Whether a run stays that `count - 1` runs of its name followed, and why."""
    newest = rule.keep_runs
    days = rule.older_than_days
    if entry.platform != "local" and entry.status not in ENDED_RUN:
        return True, f"it is not known to be over on {entry.platform}"
    if count <= newest:
        return True, f"it is one of the {newest} newest of its name"
    began = formats.instant(entry.started_at)
    if began is None or dt.datetime.now(dt.UTC) - began < dt.timedelta(days=days):
        return True, f"it began less than {days} days ago"
    return (
        False,
        f"it is older than {days} days, and not one of the {newest} newest of its name",
    )
