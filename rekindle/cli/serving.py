"""A champion that answers: over HTTP, for the rows of a file, and whether what it is
asked and answers is still like what was judged."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from pydantic import TypeAdapter

from rekindle import formats
from rekindle.app.runs import load_target_spec
from rekindle.cli.options import (
    Overrides,
    PlatformChoice,
    at_home,
    config,
    moment,
    of_config,
    shared,
    tell,
)
from rekindle.errors import RequestError
from rekindle.launch.process import compute_threads
from rekindle.records import Monitored, Signal
from rekindle.serve.messages import ServeJob
from rekindle.spec.installed import platform_names
from rekindle.spec.load import load_target

# package -> extra of rekindle that installs it
_PACKAGES = {
    "uvloop": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "aiohttp": "serve",
    "mlflow": "registry",
    "scipy": "registry",
    "torch": "train",
    "transformers": "train",
}
SERVING = ("uvloop", "uvicorn", "prometheus_client", "aiohttp", "mlflow", "torch")
ALARM = 3  # exit code


@click.command("serve")
@click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at; at any other, all who reach it may ask.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8080,
    show_default=True,
    envvar="AIP_HTTP_PORT",
    show_envvar=True,
    help="0: any free port.",
)
@click.option(
    "--precision",
    type=click.Choice(["bf16", "int8"]),
    help="Only if its test split allows it; default: `deploy.precision`, or as trained.",
)
@click.option("--no-smoke", is_flag=True, help="Do not prove the model by rows of its test split.")
@at_home
def serve(
    target: str | None,
    host: str,
    port: int,
    precision: str | None,
    no_smoke: bool,
    home: Path,
) -> None:
    """Answer requests over HTTP with a champion: of the model MODEL, of the CONFIG, or
    (default) of the latest run. Of a RUN the version that it registered.

    The server is ready once the rows of its test split that the evidence keeps are
    answered as the model was judged. SIGTERM and Ctrl-C end it when all that was accepted
    is answered."""
    # before the imports below, which need them
    require(*_PACKAGES)
    from rekindle.app.deploy import model_to_serve

    spec, version = load_target_spec(target, home)
    if precision:
        deploy = spec.deploy.model_copy(update={"precision": precision})
        spec = spec.model_copy(update={"deploy": deploy})
    job = ServeJob(
        model=model_to_serve(spec, home, version),
        host=host,
        port=port,
        smoke=not no_smoke,
        health_route=os.environ.get("AIP_HEALTH_ROUTE", ServeJob.health_route),
        predict_route=os.environ.get("AIP_PREDICT_ROUTE", ServeJob.predict_route),
    )
    job_text = TypeAdapter(ServeJob).dump_json(job).decode()
    command = [sys.executable, "-P", "-m", "rekindle.serve", job_text]
    # in the place of this process: signals reach the server itself
    os.execve(command[0], command, {**os.environ, **compute_threads()})  # noqa: S606 - no shell


@click.command("predict")
@config
@click.option(
    "--input",
    "source",
    required=True,
    metavar="URI",
    help="What `data.source` may be: the same columns, without labels.",
)
@click.option(
    "--output",
    required=True,
    metavar="URI",
    help="Folder of parts, called NAME.parquet or NAME.jsonl.",
)
@shared
def predict(config: Path, source: str, output: str, home: Path, as_json: bool) -> None:
    """Write what the champion of CONFIG predicts for the rows of --input, each with its
    id (the key, or its place), in parts of 1,000 rows. A command that was interrupted
    continues behind the last part when you rerun it."""
    require("mlflow", "torch", "transformers")
    spec = load_target(config)
    from rekindle.app.deploy import model_to_serve

    model = model_to_serve(spec, home)
    os.environ.update(compute_threads())  # before torch is imported
    from rekindle.serve import batch

    assert spec.data is not None  # else there is no served model

    def on_part(parts: int, rows: int) -> None:
        click.echo(f"part {parts}: {rows:,} rows", err=True)

    result = batch.predict(model, spec.data, source, output, on_part)
    text = f"{result.rows:,} predictions of {result.model} version {result.version} in {output}"
    tell(result, text, as_json)


@click.command("monitor")
@of_config
@click.option(
    "--platform",
    type=PlatformChoice(["local", *platform_names()]),
    default="local",
    show_default=True,
    help="Where the model is deployed.",
)
@click.option("--now", metavar="TIME", help="Look as if it were TIME (UTC): for replays.")
@shared
def monitor(
    config: Path,
    overrides: Overrides,
    platform: str,
    now: str | None,
    home: Path,
    as_json: bool,
) -> int:
    """Compare what CONFIG's champion was asked and answered within `monitor.window` with
    the rows that judged it: words, lengths or pixels, predicted classes, confidence, and,
    where labels have arrived, accuracy.

    Exit codes: 0 quiet, or too few rows to tell; 3 an alarm."""
    at = moment(now)
    require("mlflow", "scipy")
    from rekindle.app.monitor import check
    from rekindle.report.index import render_index

    monitored = check(load_target(config, overrides), home, platform, at)
    render_index(home)  # which draws live accuracy and alarms
    tell(monitored, "\n".join(_lines(monitored)), as_json)
    return ALARM if monitored.verdict == "alarm" else 0


def _lines(monitored: Monitored) -> Iterator[str]:
    """A check of what serves, for people."""
    period = f"{monitored.start[:16]} to {monitored.end[:16]}"
    rows = f"{monitored.rows:,} rows"
    if monitored.left_out:
        left_out = [f"{count:,} {reason}" for reason, count in monitored.left_out.items()]
        rows += f" ({', '.join(left_out)} left out)"
    yield f"{monitored.name} version {monitored.version}, {period}: {rows}"
    if monitored.signals:
        head = ("signal", "before", "now", "apart", "p", "found from", "")
        rows_of_table = [head, *map(_cells, monitored.signals)]
        yield from formats.aligned(rows_of_table, right=range(1, 6))
    if monitored.expected_accuracy is not None:
        yield f"accuracy by confidence, an estimate: {monitored.expected_accuracy:.4f}"
    yield f"{monitored.verdict.replace('_', ' ')}: {monitored.reason}"


def _cells(signal: Signal) -> tuple[str, ...]:
    """The row of a signal in the table."""
    before = f"{signal.before:.4g}"
    now = f"{signal.now:.4g}"
    effect = f"{signal.effect:.3f}"
    if signal.name == "latency":
        before = formats.seconds(signal.before)
        now = formats.seconds(signal.now)
        effect = formats.seconds(signal.effect)
    p_value = f"{signal.p_value:.2g}"
    detectable = "" if signal.detectable is None else f"±{signal.detectable:.3g}"
    alarm = "ALARM" if signal.alarm else ""
    return (signal.name, before, now, effect, p_value, detectable, alarm)


def require(*packages: str) -> None:
    """Raise RequestError unless the packages are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_PACKAGES[name] for name in missing}))
        fix = f"pip install 'rekindle[{extras}]'"
        raise RequestError(f"{', '.join(missing)} is not installed", fix=fix)
