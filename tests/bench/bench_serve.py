"""Requests a second, and processor time of the server for each, beside `mlflow models serve`, FastAPI without batching,
litserve, and, for a language model, `transformers serve`; and what the router of `rekindle deploy` costs.

    python tests/bench/bench_serve.py [--pairs 3] [--seconds 4] [--home HOME] [--only classifier|language|router]

One champion of configs/reviews.yaml or reviews-lm.yaml (trained here unless HOME has one) behind the servers, which are up all
the time, each with one thread of its own to compute; clients take turns with them, on connections that stay open, with 1 and with
16 at a time. The processor time is that of all processes of the server in its turn, over the requests of that turn. litserve is
left out where it is not installed: `pip install --no-deps --target FOLDER litserve uvloop httptools`, FOLDER in PYTHONPATH."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import contest
import psutil
from contest import ROOT, compared, interval

sys.path.insert(0, str(ROOT))
from tests.ports import free_port

TEXTS = [json.loads(line)["text"] for line in (ROOT / "configs/data/reviews.jsonl").open()][:200]
GOALS = {1: 1.0, 16: 1.5}  # requests a second, ours over the peer's

FASTAPI = """
import sys
from pathlib import Path
import torch, uvicorn
from fastapi import FastAPI
from rekindle.train.modelfolder import open_model

torch.set_num_threads(1)
opened = open_model(Path(sys.argv[1]))
network, app = opened.network(), FastAPI()

@app.get("/ready")
def ready():
    return {}

@app.post("/predict")
def predict(body: dict):
    texts = [one["text"] for one in body["instances"]]
    rows = opened.task.encode_raw(texts, opened.settings, opened.path)
    with torch.inference_mode():
        logits = opened.task.logits(network, opened.task.collate(rows, opened.settings))
    tops, labels = torch.softmax(logits.double(), -1).max(-1)
    pairs = zip(labels.tolist(), tops.tolist())
    return {"predictions": [{"label": opened.labels[i], "probability": p} for i, p in pairs]}

uvicorn.run(app, port=int(sys.argv[2]), log_level="warning", access_log=False)
"""

LITSERVE = """
import sys
from pathlib import Path
import litserve, torch
from rekindle.train.modelfolder import open_model

class Api(litserve.LitAPI):
    def setup(self, device):
        torch.set_num_threads(1)
        self.opened = open_model(Path(sys.argv[1]))
        self.network = self.opened.network()

    def decode_request(self, request):
        return request["instances"][0]["text"]

    def batch(self, inputs):
        return inputs

    def predict(self, texts):
        opened = self.opened
        rows = opened.task.encode_raw(texts, opened.settings, opened.path)
        with torch.inference_mode():
            logits = opened.task.logits(self.network, opened.task.collate(rows, opened.settings))
        tops, labels = torch.softmax(logits.double(), -1).max(-1)
        pairs = zip(labels.tolist(), tops.tolist())
        return [{"label": opened.labels[i], "probability": p} for i, p in pairs]

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return {"predictions": [output]}

if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.002, api_path="/predict")
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(port=int(sys.argv[2]), log_level="warning", generate_client_file=False)
"""


class Served:
    """A server process, the route that is asked, and what is sent."""

    def __init__(
        self, words: list[str], port: int, route: str, ready: str, body: Any, log: Path
    ) -> None:
        self.port, self.route, self.ready, self.body = port, route, ready, body
        self.began = time.monotonic()
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **contest.environment(),
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                },
            )

    @classmethod
    def there(cls, pid: int, port: int) -> Served:
        """One that runs already."""
        made = cls.__new__(cls)
        made.process, made.port, made.route = psutil.Process(pid), port, "/predict"
        made.body, made.ready, made.began = instances, "/health/ready", time.monotonic()
        return made

    def cpu_seconds(self) -> float:
        total = 0.0
        parent = psutil.Process(self.process.pid)
        for one in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                total += times.user + times.system
        return total

    def megabytes(self) -> float:
        parent = psutil.Process(self.process.pid)
        return (
            sum(one.memory_info().rss for one in (parent, *parent.children(recursive=True))) / 1e6
        )


async def asked(served: Served, clients: int, seconds: float) -> list[float]:
    """Seconds that each request took."""
    taken: list[float] = []
    until = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        turn = number
        while time.perf_counter() < until:
            turn += clients
            body = json.dumps(served.body(TEXTS[turn % len(TEXTS)])).encode()
            head = f"POST {served.route} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            began = time.perf_counter()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            length = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            content = await reader.readexactly(length)
            assert b"probability" in content or b'"choices"' in content, content
            taken.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(client(i) for i in range(clients)))
    return taken


def turn(served: Served, clients: int, seconds: float, number: int) -> dict[str, float]:
    """One contestant's turn."""
    before = served.cpu_seconds()
    taken = sorted(asyncio.run(asked(served, clients, seconds)))
    cpu = served.cpu_seconds() - before
    return {
        "requests/s": round(len(taken) / seconds, 1),
        "cpu ms": round(1e3 * cpu / len(taken), 3),
        "p50 ms": round(1e3 * taken[len(taken) // 2], 2),
        "p99 ms": round(1e3 * taken[len(taken) * 99 // 100], 2),
    }


@contextlib.contextmanager
def servers(home: Path, folder: Path) -> Iterator[dict[str, Served]]:
    """All that answer with the classifier, ready."""
    ours, flask, fast, lit = free_port(), free_port(), free_port(), free_port()
    model = model_of(home, "reviews")
    (folder / "peer.py").write_text(FASTAPI)
    (folder / "lit.py").write_text(LITSERVE)
    cli = serve(home, "reviews")
    mlflow = [sys.executable, "-m", "mlflow", "models", "serve", "-m", str(model.parent.parent)]
    found = {
        "rekindle serve": Served(
            [*cli, "--port", str(ours)],
            ours,
            "/predict",
            "/health/ready",
            instances,
            folder / "ours.txt",
        ),
        "FastAPI, no batching": Served(
            [sys.executable, str(folder / "peer.py"), str(model), str(fast)],
            fast,
            "/predict",
            "/ready",
            instances,
            folder / "fast.txt",
        ),
        "mlflow models serve": Served(
            [*mlflow, "--env-manager", "local", "-p", str(flask)],
            flask,
            "/invocations",
            "/ping",
            lambda text: {"dataframe_split": {"columns": ["text"], "data": [[text]]}},
            folder / "mlflow.txt",
        ),
    }
    if importlib.util.find_spec("litserve"):
        found["litserve"] = Served(
            [sys.executable, str(folder / "lit.py"), str(model), str(lit)],
            lit,
            "/predict",
            "/health",
            instances,
            folder / "lit.txt",
        )
    with up(found):
        yield found


@contextlib.contextmanager
def writers(home: Path, folder: Path) -> Iterator[dict[str, Served]]:
    """Ours, and transformers' own with and without its continuous batching, which all write 32 tokens of the same."""
    model = str(model_of(home, "reviews-lm"))
    peer = [
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        model,
        "--device",
        "cpu",
        "--host",
        "127.0.0.1",
    ]
    found = {}
    for name, words, asked in (
        ("rekindle serve", serve(home, "reviews-lm"), "reviews-lm"),
        ("transformers serve", peer, model),
        (
            "transformers serve --continuous-batching",
            [
                *peer,
                "--continuous-batching",
                "--cb-num-blocks",
                "256",
                "--cb-max-batch-tokens",
                "256",
            ],
            model,
        ),
    ):
        port = free_port()
        body = functools.partial(completion, asked)
        ready = "/health/ready" if name == "rekindle serve" else "/health"
        log = folder / f"{len(found)}.txt"
        found[name] = Served(
            [*words, "--port", str(port)], port, "/v1/completions", ready, body, log
        )
    with up(found):
        yield found


@contextlib.contextmanager
def routed(home: Path, folder: Path) -> Iterator[dict[str, Served]]:
    """The same server of a deployment, asked by its router and directly."""
    port, config = free_port(), str(ROOT / "configs/reviews.yaml")
    command = ["-m", "rekindle.cli.main", "deploy"]
    contest.finished(
        contest.python(*command, config, "--home", str(home), "--port", str(port)),
        folder / "deploy.txt",
    )
    router = next(
        p
        for p in psutil.process_iter(["cmdline"])
        if "rekindle.serve.router" in (p.info["cmdline"] or ())
        and str(home.resolve()) in p.info["cmdline"][-1]
    )
    (server,) = router.children()
    (own,) = (one.laddr.port for one in server.net_connections() if one.status == "LISTEN")
    try:
        yield {
            "rekindle serve": Served.there(server.pid, own),
            "by the router": Served.there(router.pid, port),
        }
    finally:
        words = [*command, "delete", "reviews", "--yes", "--home", str(home)]
        contest.finished(contest.python(*words), folder / "delete.txt")


def instances(text: str) -> Any:
    return {"instances": [{"text": text}]}


def completion(model: str, text: str) -> Any:
    return {
        "model": model,
        "prompt": " ".join(text.split()[:6]),
        "max_tokens": 32,
        "temperature": 0.0,
    }


def model_of(home: Path, name: str) -> Path:
    (model,) = (path.parent for path in (home / "mlartifacts" / name).rglob("rekindle.json"))
    return model


def serve(home: Path, name: str) -> list[str]:
    return [sys.executable, "-m", "rekindle.cli.main", "serve", name, "--home", str(home)]


@contextlib.contextmanager
def up(found: dict[str, Served]) -> Iterator[None]:
    """Until all are ready, and to their end."""
    try:
        for name, served in found.items():
            wait(served, name)
        yield
    finally:
        for served in found.values():
            with contextlib.suppress(psutil.Error):
                for one in psutil.Process(served.process.pid).children(recursive=True):
                    one.terminate()
            served.process.terminate()
            try:
                served.process.wait(30)
            except subprocess.TimeoutExpired:
                served.process.kill()


def wait(served: Served, name: str) -> None:
    import httpx

    while True:
        assert served.process.poll() is None, f"{name} ended"
        assert time.monotonic() < served.began + 180, f"{name} is not ready"
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{served.port}{served.ready}").status_code == 200:
                print(f"{name}: ready after {time.monotonic() - served.began:.0f} s", flush=True)
                return
        time.sleep(0.1)


def main() -> None:
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--pairs", type=int, default=3)
    words.add_argument("--seconds", type=float, default=4.0)
    words.add_argument("--home", type=Path)
    words.add_argument("--only", choices=["classifier", "language", "router"], default="")
    given = words.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        home = given.home or folder / "home"
        for name in ("reviews", "reviews-lm") if given.home is None else ():
            config = [str(ROOT / f"configs/{name}.yaml"), "--home", str(home)]
            contest.finished(
                contest.python("-m", "rekindle.cli.main", "run", *config), folder / "run.txt"
            )
        every = {"classifier": servers, "language": writers, "router": routed}
        for what in [given.only] if given.only else every:
            goals = GOALS if what != "router" else dict.fromkeys(GOALS, 0.0)  # its cost has no goal
            measure(every[what](home, folder), given, goals)


def measure(
    all_up: contextlib.AbstractContextManager[dict[str, Served]],
    given: argparse.Namespace,
    goals: dict[int, float],
) -> None:
    with all_up as found:
        for served in found.values():
            asyncio.run(asked(served, 16, 2.0))  # all of them warm
        for clients, goal in goals.items():
            turns = {
                name: functools.partial(turn, served, clients, given.seconds)
                for name, served in found.items()
            }
            show(contest.pairs(turns, given.pairs), clients, goal)
        for name, served in found.items():
            print(f"{name}: {served.megabytes():.0f} MB")


def show(results: dict[str, list[dict[str, float]]], clients: int, goal: float) -> None:
    ours = results["rekindle serve"]
    for name, theirs in results.items():
        means = {key: interval([one[key] for one in theirs])[0] for key in theirs[0]}
        print(
            f"{clients:>2} clients, {name}: " + ", ".join(f"{k} {v:.3g}" for k, v in means.items())
        )
        if theirs is not ours and goal:
            rates = [[one["requests/s"] for one in each] for each in (ours, theirs)]
            print(
                contest.show(
                    compared(f"requests/s, {clients} clients", name, *rates, goal, at_least=True)
                )
            )
            times = [[one["cpu ms"] for one in each] for each in (ours, theirs)]
            row = compared(
                f"cpu a request, {clients} clients", name, *times, 1 / goal, at_least=False
            )
            print(contest.show(row))


if __name__ == "__main__":
    main()
