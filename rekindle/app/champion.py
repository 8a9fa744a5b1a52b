"""The champion of a model, and moving that alias by hand: the registry first, then the records,
cards and lists of the runs that it concerns."""

from collections.abc import Collection
from pathlib import Path

from rekindle.app.runs import read_run, rewrite_record
from rekindle.errors import RequestError
from rekindle.launch.events import emit
from rekindle.platforms.platform import Platform
from rekindle.records import Decision, Registration, RunRecord
from rekindle.registry import models, promotion
from rekindle.registry.history import existing
from rekindle.registry.models import Registry
from rekindle.report.collect import collect
from rekindle.report.ledger import ledger
from rekindle.spec.model import Spec


def registry_of(spec: Spec, home: Path) -> Registry:
    """Where the versions of a config's model live."""
    return Registry(spec.registration, spec.model_name, str(home.resolve()))


def promote_run(home: Path, record: RunRecord, reason: str) -> tuple[Registration, bool]:
    """Make the candidate of a run the champion; True if it is that already. Raises RequestError
    where the run has no candidate that passed its gate, and RegistryError as `promote` does."""
    found = collect(record, history=False)
    if found.registration is None or found.evidence is None:
        what = f"the run {record.run_id} registered no model"
        raise RequestError(what, fix="name a run that did; `rekindle runs` lists them")
    if not found.evidence.promote and not (reason and found.evidence.is_for_a_person):
        what = f"the gate refused the candidate of {record.run_id}: {found.evidence.reason}"
        fix = "a refused candidate cannot be approved; change the config and run again"
        if found.evidence.is_for_a_person:
            fix = "say why it is to be the champion all the same: --reason TEXT"
        raise RequestError(what, fix=fix)
    where = registry_of(Spec.model_validate(record.spec), home)
    version, before = found.registration.version, models.aliases(where).get("champion", "")
    done = found.registration.decision == "promoted" and before == version
    registered = promotion.promote(where, found.registration, found.files["evidence"], reason)
    registered.write(found.files["registration"])
    rewrite_record(record, home)
    _show(home, where, {before, version})
    publish(Spec.model_validate(record.spec), home)
    return registered, done


def publish(spec: Spec, home: Path) -> None:
    """Put the champion into the registries of `register.publish`, and its names there into ours."""
    where = registry_of(spec, home)
    if not spec.registration.publish:
        return
    model = models.served_model(where, spec.data, spec.task)
    lineage = models.lineage_of(where, model.version)
    for name in spec.registration.publish:
        getattr(spec.platforms, name).refuse_if_incomplete()
        named = Platform.of(name, spec.platforms).publisher(where.name).publish(model, lineage)
        emit("notice", text=f"version {model.version} is the champion on {name}: {named}")
        models.note_published(where, model.version, name, named)


def roll_back(
    home: Path, where: Registry, reason: str, to: str, *, by_hand: bool = False
) -> tuple[str, str]:
    """See `promotion.roll_back`; the cards and lists of the runs that made both versions follow."""
    moved = promotion.roll_back(where, reason, to, by_hand=by_hand)
    _show(home, where, moved)
    return moved


def _show(home: Path, where: Registry, versions: Collection[str]) -> None:
    """Let records of the runs of these versions, or of a champion, say what the registry says."""
    entries = [e for e in ledger(home).entries if e.is_champion or e.version in versions]
    for record in (read_run(home, entry.run_id) for entry in entries):
        found = collect(record, history=False)
        known = found.registration
        if known is None or known.name != where.name:
            continue
        with where.open(f"look at version {known.version} of {where.name}") as client:
            tagged = existing(client, where, known.version).get("decision")
            decision: Decision = known.decision
            if tagged in ("promoted", "rolled_back"):
                decision = "promoted" if tagged == "promoted" else "rolled_back"
            version = client.get_model_version(where.name, known.version)
            now = models.registration(client, where, version, known.created, decision)
        if now != known:
            now.write(found.files["registration"])
            rewrite_record(record, home)
