"""`rekindle promote RUN`: the approval that `register.approval: manual` waits for."""

from pathlib import Path

import click

from rekindle.app.runs import find_run, shown_anew
from rekindle.cli.options import shared, tell
from rekindle.errors import RequestError
from rekindle.report.collect import collect
from rekindle.spec.model import Spec


@click.command("promote")
@click.argument("run")
@shared
def command(run: str, home: Path, as_json: bool) -> None:
    """Make the candidate of RUN the champion, after its evidence has been checked again."""
    record = find_run(home, run)
    found = collect(record, history=False)
    if found.registration is None or found.evidence is None:
        what = f"the run {record.run_id} registered no model"
        raise RequestError(what, fix="name a run that did; `rekindle runs` lists them")
    if not found.evidence.promote:
        what = f"the gate refused the candidate of {record.run_id}: {found.evidence.reason}"
        fix = "a refused candidate cannot be approved; change the config and run again"
        raise RequestError(what, fix=fix)
    from rekindle.registry.models import Registry, aliases
    from rekindle.registry.promotion import promote

    spec = Spec.model_validate(record.spec)
    where = Registry(spec.registration, spec.model_name, str(home.resolve()))
    promoted = found.registration.decision == "promoted"
    done = promoted and aliases(where).get("champion") == found.registration.version
    registration = promote(where, found.registration, found.files["evidence"])
    registration.write(found.files["registration"])
    shown_anew(record, home)
    how = "already the champion; nothing changed" if done else "now the champion"
    tell(registration, f"{registration.name} version {registration.version} is {how}", as_json)
