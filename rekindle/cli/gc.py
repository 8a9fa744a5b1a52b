"""`rekindle gc`: lists what old runs left under the home folder, and removes it."""

import re
from collections.abc import Sequence
from pathlib import Path

import click

from rekindle import formats
from rekindle.app.champion import registry_of
from rekindle.cli.options import agree, answer, shared, yes
from rekindle.outputs import Collected, HomeItem
from rekindle.platforms.local.removal import remove
from rekindle.records import RunRecord
from rekindle.registry.models import Registry, aliased, aliases
from rekindle.report.index import render_index
from rekindle.report.retention import Retention
from rekindle.spec.model import recorded_spec


def _days(_context: click.Context, _option: click.Parameter, value: str | None) -> int | None:
    """A number of days, such as `30d`."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,5}) ?d(ays?)?", value or "0d")
    if match is None:
        raise click.BadParameter("give days, such as 30d")
    return int(match[1])


@click.command("gc")
@click.option(
    "--keep-runs",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many of the newest runs of each name stay; default: retention.keep_runs of "
    "their config.",
)
@click.option(
    "--older-than",
    "days",
    metavar="30d",
    callback=_days,
    help="Every younger run stays; default: retention.older_than_days.",
)
@yes
@shared
def command(keep_runs: int | None, days: int | None, yes: bool, home: Path, as_json: bool) -> None:
    """List what can be removed, ask, and remove it: runs that exceed the retention
    limits, files that only those runs use, checkpoints of finished trainings, copies of
    models that no version with an alias and no deployment has, and what killed processes
    left. A run stays if its model version has an alias in the registry, or if its
    candidate waits for approval. Nothing is removed from the registry."""
    root = home.resolve()

    def registry(run: RunRecord) -> Registry:
        return registry_of(recorded_spec(run.spec), root)

    retention = Retention(
        root,
        lambda run: aliases(registry(run)),
        keep_runs,
        days,
        lambda run: aliased(registry(run)),
    )
    items = list(retention.look())
    to_remove = [item for item in items if not item.stays]
    _print_table(items)
    if not to_remove:
        click.echo("nothing to remove", err=True)
    else:
        agree(yes, f"Remove {len(to_remove):,} things, {_size(to_remove)}?")
        staying = [item for item in items if item.stays]
        # only what is still removable by then, as `look` says once more
        items = staying + remove(root, retention.look, to_remove)
        render_index(root)
        removed = [item for item in items if not item.stays]
        click.echo(f"removed {len(removed):,} things, {_size(removed)}", err=True)
    if as_json:
        answer(Collected(items=tuple(items)))


def _print_table(items: Sequence[HomeItem]) -> None:
    """Print a line for each kind of thing and reason, what may go first."""
    if not items:
        return
    groups = dict[tuple[bool, str, str], list[HomeItem]]()
    for item in sorted(items, key=lambda item: item.stays):
        groups.setdefault((item.stays, item.kind, item.why), []).append(item)
    lines = [("", "what", "how many", "size", "why")]
    for (stays, kind, why), members in groups.items():
        count = f"{len(members):,}"
        if stays:
            lines.append(("stays", kind, count, "", why))
        else:
            lines.append(("goes", kind, count, _size(members), why))
    click.echo("\n".join(formats.aligned(lines)), err=True)


def _size(items: Sequence[HomeItem]) -> str:
    return formats.size(sum(item.bytes for item in items))
