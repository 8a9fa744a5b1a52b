"""`rekindle predict CONFIG`: the champion's predictions for a file, here."""

import os
from pathlib import Path

import click

from rekindle.cli.options import config, shared, tell
from rekindle.cli.serve import require
from rekindle.launch.process import compute_threads
from rekindle.spec.load import load_target


@click.command("predict")
@config
@click.option("--input", "source", required=True, metavar="URI",
              help="What `data.source` may be: the same columns, without labels.")  # fmt: skip
@click.option("--output", required=True, metavar="URI",
              help="Folder of parts, called NAME.parquet or NAME.jsonl.")  # fmt: skip
@shared
def command(config: Path, source: str, output: str, home: Path, as_json: bool) -> None:
    """Write what the champion of CONFIG predicts for the rows of --input, each with its id (the
    key, or its place), in parts of 1,000 rows. A command that was interrupted continues behind the
    last part when you rerun it."""
    require("mlflow", "torch", "transformers")
    spec = load_target(config)
    from rekindle.app.deploy import served

    model = served(spec, home)
    os.environ.update(compute_threads())  # before torch is imported
    from rekindle.serve.batch import predict

    assert spec.data is not None  # else there is no served model

    def on_part(parts: int, rows: int) -> None:
        click.echo(f"part {parts}: {rows:,} rows", err=True)

    done = predict(model, spec.data, source, output, on_part)
    text = f"{done.rows:,} predictions of {done.model} version {done.version} in {output}"
    tell(done, text, as_json)
