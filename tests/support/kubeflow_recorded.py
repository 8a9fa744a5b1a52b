"""What real KFP answered (tests/platforms/kubeflow/recorded), answered again over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rekindle.platforms.kubeflow.section import KubeflowSpec

RECORDED = Path(__file__).parents[1] / "platforms" / "kubeflow" / "recorded"
STEPS = {
    "hello": ["greet", "shout"],
    "fail": ["bad", "after"],
    "slow": ["slow"],
    "digits": [
        "fingerprint",
        "ingest",
        "shard",
        "finetune",
        "score",
        "evaluate",
        "register",
        "condition-1/promote",
    ],
}


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def pipeline(steps: list[str]) -> Any:
    """As much of a pipeline as tells its steps."""
    components: dict[str, Any] = {}
    root: dict[str, Any] = {"tasks": {}}
    for step in steps:
        *around, name = step.split("/")
        tasks = root["tasks"]
        for part in around:
            nested: dict[str, Any] = {"tasks": {}}
            tasks[part] = {
                "componentRef": {"name": f"comp-{part}"},
                "dependentTasks": [*tasks],
            }
            components[f"comp-{part}"] = {"dag": nested}
            tasks = nested["tasks"]
        tasks[name] = {
            "componentRef": {"name": f"comp-{name}"},
            "dependentTasks": [*tasks],
        }
        components[f"comp-{name}"] = {"executorLabel": f"exec-{name}"}
    executors = {
        f"exec-{step.rpartition('/')[2]}": {"container": {"image": "any"}} for step in steps
    }
    return {
        "components": components,
        "deploymentSpec": {"executors": executors},
        "root": {"dag": root},
    }


class Replay:
    """Answers with a recording; what it was asked stands in `asked`."""

    def __init__(self, answers: dict[str, tuple[int, str]]) -> None:
        self.answers, self.asked = answers, list[str]()

    def answer(self, path: str, query: str) -> tuple[int, str]:
        """Status and body; `query` is for those who look at it."""
        return self.answers.get(path, (404, '{"error": "Not Found"}'))

    @contextmanager
    def serving(self) -> Iterator[KubeflowSpec]:
        replay = self

        class Handler(BaseHTTPRequestHandler):
            def any(self) -> None:
                path, _, query = f"{self.command} {self.path}".partition("?")
                replay.asked.append(path)
                status, body = replay.answer(path, query)
                self.send_response(status)
                kind = "text/html" if body.startswith("<html") else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_POST = any

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
            threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
            yield KubeflowSpec(host=f"http://127.0.0.1:{listening.server_port}")
            listening.shutdown()


def replay_of(recording: Any, steps: list[str], workflow: Any = None) -> Replay:
    id = recording["run"]["run_id"]
    run = {**recording["run"], "pipeline_spec": pipeline(steps)}
    manifest = json.dumps(workflow or recording["workflow"])
    older = {"run": {"id": id}, "pipeline_runtime": {"workflow_manifest": manifest}}
    answers = {
        f"GET /apis/v2beta1/runs/{id}": (200, json.dumps(run)),
        f"GET /apis/v1beta1/runs/{id}": (200, json.dumps(older)),
    }
    for log in recording["logs"]:
        answers[f"GET {log['GET']}"] = (log["status"], log["body"])
    return Replay(answers)
