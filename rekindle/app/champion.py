"""The champion of a model, and moving that alias by hand: the registry first, then the
records, cards and lists of the runs that it concerns.

The step or command that moves the alias also publishes the version in the registries of
`register.publish`, through the endpoint classes, which know names, tags and files;
MLflow's version notes the name. Rejected: SageMaker's own step RegisterModel, which has
no lineage, no way back, and no counterpart on other platforms; a component of its own,
which needs a gate in each pipeline and leaves `rollback` out; every candidate, because
nothing serves them. The cost: a promotion may fail behind the alias, and the same command
completes it."""

from collections.abc import Collection
from pathlib import Path

from rekindle.app.runs import no_model_of, read_run, rewrite_record
from rekindle.errors import RequestError
from rekindle.launch.events import emit
from rekindle.platforms.api import platform_of, publisher_of
from rekindle.records import Decision, Registration, RunRecord
from rekindle.registry import models, promotion
from rekindle.registry.history import existing
from rekindle.registry.models import Registry
from rekindle.report.collect import collect
from rekindle.report.ledger import ledger
from rekindle.spec.model import Spec, recorded_spec


def registry_of(spec: Spec, home: Path) -> Registry:
    """The registry with the versions of a config's model."""
    return Registry(spec.registration, spec.model_name, str(home.resolve()))


def promote_run(home: Path, record: RunRecord, reason: str) -> tuple[Registration, bool]:
    """Make the candidate of a run the champion; True if it is that already.

    Raises RequestError where the run has no candidate that passed its gate, and
    RegistryError as `promote` does."""
    findings = collect(record, history=False)
    registration = findings.registration
    evidence = findings.evidence
    if registration is None or evidence is None:
        raise no_model_of(record)
    if not evidence.promote and not (reason and evidence.is_for_a_person):
        fix = "a refused candidate cannot be approved; change the config and run again"
        if evidence.is_for_a_person:
            fix = "say why it is to be the champion all the same: --reason TEXT"
        raise RequestError(
            f"the gate refused the candidate of {record.run_id}: {evidence.reason}",
            fix=fix,
        )
    spec = recorded_spec(record.spec)
    registry = registry_of(spec, home)
    version = registration.version
    champion_before = models.aliases(registry).get("champion", "")
    was_champion = registration.decision == "promoted" and champion_before == version
    # the registry first: records and cards repeat what it says
    promoted = promotion.promote(registry, registration, findings.files["evidence"], reason)
    promoted.write(findings.files["registration"])
    rewrite_record(record, home)
    _update_records(home, registry, {champion_before, version})
    publish(spec, home)
    return promoted, was_champion


def publish(spec: Spec, home: Path) -> None:
    """Put the champion into the registries of `register.publish`.

    Its names there are noted in our registry."""
    registry = registry_of(spec, home)
    if not spec.registration.publish:
        return
    model = models.served_model(registry, spec.data, spec.task)
    lineage = models.lineage_of(registry, model.version)
    # what fails here, behind the alias, is completed by the same command
    for platform in spec.registration.publish:
        target = platform_of(platform, spec.platforms)
        target.settings.refuse_if_incomplete()
        publisher = publisher_of(target, registry.name)
        name = publisher.publish(model, lineage)
        emit(
            "notice",
            text=f"version {model.version} is the champion on {platform}: {name}",
        )
        models.note_published(registry, model.version, platform, name)


def roll_back(
    home: Path, registry: Registry, reason: str, to: str, *, by_hand: bool = False
) -> tuple[str, str]:
    """Move the alias back, as `promotion.roll_back` does, and then the cards and lists of
    the runs that made both versions, which are returned."""
    versions = promotion.roll_back(registry, reason, to, by_hand=by_hand)
    _update_records(home, registry, versions)
    return versions


def _update_records(home: Path, registry: Registry, versions: Collection[str]) -> None:
    """Bring the records of these versions' and of champions' runs up to date."""
    for entry in ledger(home).entries:
        if not (entry.is_champion or entry.version in versions):
            continue
        record = read_run(home, entry.run_id)
        findings = collect(record, history=False)
        recorded = findings.registration
        if recorded is None or recorded.name != registry.name:
            continue
        current = _registration_now(registry, recorded)
        # also where another home has moved the alias since
        if current != recorded:
            current.write(findings.files["registration"])
            rewrite_record(record, home)


def _registration_now(registry: Registry, recorded: Registration) -> Registration:
    """The registration of a version as the registry has it now."""
    with registry.open(f"look at version {recorded.version} of {registry.name}") as client:
        tag = existing(client, registry, recorded.version).get("decision")
        decision: Decision = recorded.decision
        if tag == "promoted":
            decision = "promoted"
        elif tag == "rolled_back":
            decision = "rolled_back"
        version = client.get_model_version(registry.name, recorded.version)
        return models.registration(client, registry, version, recorded.created, decision)
