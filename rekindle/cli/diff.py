"""`rekindle diff CONFIG --platform P`: which steps will run again, and why, against what was
submitted last or a folder; sends nothing."""

from pathlib import Path

import click

from rekindle.app.compile import compiled
from rekindle.app.pipeline import graph_of
from rekindle.app.plan import on_machines
from rekindle.app.runs import files_in, last_sent
from rekindle.cli.options import FOLDER, Overrides, config, overrides, shared, tell
from rekindle.errors import RequestError
from rekindle.outputs import Difference
from rekindle.platforms.cache_diff import compare
from rekindle.platforms.platform import PLATFORMS, Platform
from rekindle.spec.load import load_target


@click.command("diff")
@config
@overrides
@click.option("--platform", type=click.Choice(list(PLATFORMS)), required=True,
              help="The platform to compile for.")  # fmt: skip
@click.option("--against", type=FOLDER, default=None,
              help="What `rekindle compile` wrote; default: what was submitted last.")  # fmt: skip
@shared
def command(
    config: Path, overrides: Overrides, platform: str, against: Path | None, home: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """Say which steps of CONFIG the platform will run again, compared with what was submitted
    last, and why. Steps that it takes from its cache are listed as such."""
    spec = on_machines(load_target(config, overrides), platform, home)
    against = against or last_sent(spec.name, platform, home)
    before = files_in(against)
    there = Platform.of(platform, spec.platforms)
    after = compiled(platform, spec, *graph_of(spec))
    if after.entry not in before:
        fix = f"rekindle compile {config} --platform {platform} -o {against}"
        raise RequestError(f"{against} holds no {after.entry}", where="--against", fix=fix)
    known = {n: c for n, c in before.items() if n == after.entry or n.startswith("bundles/")}
    verdicts = compare(there.cache_keys(known), there.cache_keys(after.files))
    width = max((len(verdict.step) for verdict in verdicts), default=0)
    words = {"yes": "runs again", "perhaps": "may run again", "no": "cached", "gone": "gone"}
    lines = [f"{one.step:<{width}}  {words[one.again]:<13}  {one.why}" for one in verdicts]
    tell(Difference(platform=platform, steps=verdicts), "\n".join(lines), as_json)
