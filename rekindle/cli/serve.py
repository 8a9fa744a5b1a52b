"""`rekindle serve [MODEL|RUN|CONFIG]`: the champion answers requests on this machine."""

import importlib.util
import os
import sys
from pathlib import Path

import click
from pydantic import TypeAdapter

from rekindle.app.runs import wanted
from rekindle.cli.options import at_home
from rekindle.errors import RequestError
from rekindle.launch.process import compute_threads
from rekindle.serve.model import ServeJob

_PACKAGES = {
    "starlette": "serve", "uvicorn": "serve", "prometheus_client": "serve", "aiohttp": "serve",
    "mlflow": "registry", "torch": "train", "transformers": "train",
}  # fmt: skip


SERVING = ("starlette", "uvicorn", "prometheus_client", "aiohttp", "mlflow", "torch")


@click.command("serve")
@click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")
@click.option("--host", default="127.0.0.1", show_default=True,
              help="Address to listen at; at any other, all who reach it may ask.")  # fmt: skip
@click.option("--port", type=click.IntRange(0, 65_535), default=8080, show_default=True,
              envvar="AIP_HTTP_PORT", show_envvar=True, help="0: any free port.")  # fmt: skip
@click.option("--precision", type=click.Choice(["bf16", "int8"]), help="Only if its "
              "test split allows it; default: `deploy.precision`, or as trained.")  # fmt: skip
@click.option("--no-smoke", is_flag=True, help="Do not prove the model by rows of its test split.")
@at_home
def command(
    target: str | None, host: str, port: int, precision: str | None, no_smoke: bool, home: Path
) -> None:  # fmt: skip
    """Answer requests over HTTP with a champion: of the model MODEL, of the CONFIG, or (default) of
    the latest run. Of a RUN the version that it registered.

    The server is ready once the rows of its test split that the evidence keeps are answered as the
    model was judged. SIGTERM and Ctrl-C end it when all that was accepted is answered."""
    require(*_PACKAGES)
    from rekindle.app.deploy import served

    spec, version = wanted(target, home)
    if precision:
        changed = {"deploy": spec.deploy.model_copy(update={"precision": precision})}
        spec = spec.model_copy(update=changed)
    job = ServeJob(
        model=served(spec, home, version), host=host, port=port,
        health_route=os.environ.get("AIP_HEALTH_ROUTE", "/health/ready"),
        predict_route=os.environ.get("AIP_PREDICT_ROUTE", "/predict"), smoke=not no_smoke,
    )  # fmt: skip
    words = [sys.executable, "-P", "-m", "rekindle.serve"]
    words.append(TypeAdapter(ServeJob).dump_json(job).decode())
    os.execve(words[0], words, {**os.environ, **compute_threads()})  # noqa: S606 - no shell


def require(*packages: str) -> None:
    """Raise RequestError unless the packages are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_PACKAGES[name] for name in missing}))
        fix = f"pip install 'rekindle[{extras}]'"
        raise RequestError(f"{', '.join(missing)} is not installed", fix=fix)
