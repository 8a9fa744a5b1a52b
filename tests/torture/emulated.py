"""Rounds of the shipped pipeline on the emulator of SageMaker: two spot hosts that are taken away or
killed, a store that stops answering, checkpoints that are damaged, an MLflow server."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.cli.main import invoke
from tests.platforms.sagemaker.conftest import stored
from tests.servers.aws.container import Failed, Host, read
from tests.servers.aws.sagemaker import Execution, Pipelines
from tests.servers.mlflow_server import mlflow_server
from tests.support.moto import can_mount
from tests.support.sagemaker_compile import IMAGE
from tests.torture import chaos, oracle
from tests.torture.chaos import Chaos
from tests.torture.heavy import CONFIG, ROOT, STEPS
from tests.torture.oracle import Failure
from tests.torture.store import damage, served

MOST_SECONDS = 1_200.0
STEPS_HIT = ["ingest", "finetune", "finetune", "finetune", "score", "register"]
PLACE = f"""
resources: {{nodes: 2, spot: true}}
register: {{tracking_uri: "%MLFLOW%"}}
platforms:
  sagemaker:
    {{region: eu-central-1, role_arn: "arn:aws:iam::123456789012:role/me", image: "{IMAGE}",
      artifact_root: "s3://lake/rekindle/"}}
"""


class Emulated:
    """Rounds in a folder, held against an execution that nothing disturbed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = ""
        if can_mount():
            with self._service(folder / "whole-emulated") as (service, made, url, *_):
                self.weights = self._result(service, service.execute(made), url)

    def round(self, seed: int, mishaps: Chaos) -> Path:
        """One round; its folder."""
        mishaps.log.append("emulated")
        place = self.folder / f"emulated-{seed}"
        if not self.weights:
            place.mkdir()
            mishaps.counts.notes.add("this machine lets us mount no /opt/ml: no emulator")
            return place
        with self._service(place) as (service, made, url, server, lake):
            execution, failed = Execution(), False
            for _ in range(mishaps.random.randint(1, 2)):
                mishaps.counts["runs"] += 1
                failed = self._disturbed(service, made, execution, server, mishaps)
                if failed and mishaps.random.random() < 0.6:
                    damage(lake, mishaps, "rekindle/checkpoints/")
            began = time.monotonic()
            found = self._result(service, service.execute(made, execution), url)
            if failed:
                mishaps.counts.recoveries.append(time.monotonic() - began)
            if found != self.weights:
                raise Failure("the weights are not those of the undisturbed execution")
        return place

    def _disturbed(
        self,
        service: Pipelines,
        made: dict[str, Any],
        execution: Execution,
        server: Any,
        mishaps: Chaos,
    ) -> bool:
        """An execution, and a mishap in one of its steps; whether it failed. It may not hang."""
        ended: list[Exception | None] = []

        def execute() -> None:
            try:
                service.execute(made, execution)
                ended.append(None)
            except Exception as error:  # noqa: BLE001 - judged below
                ended.append(error)

        kind = mishaps.random.choice(["take away", "kill one", "hold up", "stop"])
        step = "finetune" if kind == "take away" else mishaps.random.choice(STEPS_HIT)
        pause = mishaps.random.uniform(0.0, 6.0)
        mishaps.log.append(f"{pause:.1f} s after {step} began:")
        if kind == "take away":
            mishaps.did("spot machines taken away")
            service.taken_away[step] = functools.partial(_after, pause, [])
        thread = threading.Thread(target=execute, daemon=True)
        thread.start()
        while thread.is_alive() and step not in execution.turns:
            time.sleep(0.02)
        thread.join(pause)
        if kind == "kill one" and thread.is_alive():
            self._kill(execution.turns[step].attempts[-1:], mishaps)
        elif kind == "hold up" and thread.is_alive():
            mishaps.did("stores held up")
            chaos.send(server, signal.SIGSTOP)
            time.sleep(mishaps.random.uniform(0.2, 3.0))
            chaos.send(server, signal.SIGCONT)
        elif kind == "stop" and thread.is_alive():
            mishaps.did("executions stopped")
            execution.stopping.set()
        thread.join(MOST_SECONDS)
        if thread.is_alive():
            raise Failure(f"an execution hangs: {mishaps.log}")
        execution.stopping.clear()
        service.taken_away.clear()
        if ended[0] is not None and not isinstance(ended[0], Failed):
            raise Failure(f"the service ended with {ended[0]!r}") from ended[0]
        return ended[0] is not None

    def _kill(self, attempts: list[list[Host]], mishaps: Chaos) -> None:
        """SIGKILL for one process of those that run on the hosts."""
        running = [h.process for hosts in attempts for h in hosts if h.process.poll() is None]
        if tree := [process for one in running for process in chaos.processes_of(one.pid)]:
            one = mishaps.random.choice(tree)
            mishaps.did("kill one", chaos.name_of(one))
            chaos.send(one, signal.SIGKILL)

    @contextlib.contextmanager
    def _service(self, place: Path) -> Iterator[tuple[Pipelines, dict[str, Any], str, Any, Any]]:
        """An emulator of its own with what is compiled, a registry, the store's process and client."""
        (place / "mlflow").mkdir(parents=True)
        with (
            served() as (environment, server, lake),
            mlflow_server(place / "mlflow", host="127.0.0.2") as url,
        ):
            text = CONFIG.replace("%STEPS%", str(STEPS)) + PLACE.replace("%MLFLOW%", url)
            (place / "c.yaml").write_text(text.replace("platforms: {local: {ranks: 2}}\n", ""))
            out = place / "compiled"
            words = ["compile", str(place / "c.yaml"), "--platform", "sagemaker", "-o", str(out)]
            with contextlib.redirect_stdout(io.StringIO()):
                if invoke(words):
                    raise Failure("the pipeline does not compile")
            jobs = Path(tempfile.mkdtemp(dir=place))
            environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            service = Pipelines(lake, jobs, environment)
            files = chaos.files_in(out)
            named = {file.relative_to(out).as_posix(): file.read_bytes() for file in files}
            yield service, stored(service, named), url, server, lake

    def _result(self, service: Pipelines, execution: Execution, url: str) -> str:
        """The hash of the weights; one version, the champion by evidence."""
        versions, aliases = oracle.served(url, "m")
        oracle.by_evidence(versions, aliases)
        if ([v.number for v in versions], aliases) != (["1"], {"champion": "1"}):
            raise Failure(f"the registry holds {[v.number for v in versions]}, {aliases}")
        place = execution.jobs["finetune"].outputs["network"].removeprefix("s3://lake/")
        listed = service.s3.list_objects_v2(Bucket="lake", Prefix=place)["Contents"]
        (key,) = (one["Key"] for one in listed if one["Key"].endswith("/model.safetensors"))
        return hashlib.sha256(read(service.s3, f"s3://lake/{key}")).hexdigest()


def _after(seconds: float, first: list[float]) -> bool:
    """Whether so long has gone by since this was asked first."""
    first.append(time.monotonic())
    return first[-1] - first[0] > seconds
