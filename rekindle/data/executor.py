"""Executors: one function over many items, in processes here, on the nodes of the step,
on a Ray cluster or by Spark. The results come in the order of the items.

A function is named `module:function`, and gets an order and an item; these and its result
are JSON, and what is large lies in a store that all workers reach (store.py). So every
executor runs the same code, and only texts are pickled. An item that fails stops no
others: all are named in the end.

A worker here is `python -m rekindle.data.executor`, a program of its own: it imports
neither the parent's main module nor torch."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rekindle.data.store import PieceStore
from rekindle.errors import DataError, Problem, RekindleError, RequestError, StepError
from rekindle.launch.rendezvous import Rendezvous
from rekindle.spec.heartbeat import beat
from rekindle.spec.identity import TRAINING, source_hash
from rekindle.spec.model import DataSpec

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
WORTH_BYTES = 32 << 20  # of a source, another process
_MODULE = "rekindle.data.executor"
_MOST_FAILED = 20  # then no further items begin
_TRIES = 2  # of an item whose worker was killed
_LOG_SECONDS = 15.0
_CAUSE_LENGTH = 300
_CONNECT_SECONDS = 10
_ERRORS: Mapping[str, type[RekindleError]] = {"DataError": DataError, "RequestError": RequestError}

Order = Mapping[str, Any]
Answer = dict[str, Any]


class Executor(Protocol):
    """Where items are worked on; `apart`:
    by workers that do not see this machine's files."""

    apart: bool

    def map(self, function: str, order: Order, items: Sequence[Any], work: str) -> list[Any]:
        """The result of `function` for each item; `work` names the whole for all nodes.
        Raises DataError or StepError with the problems of the items that failed."""


def call(function: str, order: Order, item: Any) -> Answer:
    """`value`, or `problems` of an error's `kind`,
    with a traceback on stderr if unexpected."""
    module, _, name = function.partition(":")
    try:
        return {"value": getattr(importlib.import_module(module), name)(order, item)}
    except RekindleError as error:
        return _failure(error.problems, kind=type(error).__name__)
    except OSError as error:  # no room, no permission, a file that is gone
        problem = Problem(
            str(error),
            where=str(error.filename or ""),
            fix="the same command goes on from the pieces that are there",
        )
        return _failure([problem])
    except Exception as error:  # noqa: BLE001 - whatever a task raises belongs in the log
        traceback.print_exc()
        return _failure([_worker_problem(name, f"failed: {type(error).__name__}: {error}")])


def _failure(problems: Iterable[Problem], kind: str = "") -> Answer:
    """The answer where there is no value; `kind` is the class of the problems' error."""
    return {"problems": [dataclasses.asdict(problem) for problem in problems], "kind": kind}


def _worker_problem(name: str, how: str, fix: str = "see its traceback above") -> Problem:
    return Problem(f"a worker that runs {name} {how}", "", fix)


def _values(answers: Sequence[Answer]) -> list[Any]:
    """The values of all answers, or all that went wrong."""
    failures = [answer for answer in answers if "value" not in answer]
    if not failures:
        return [answer["value"] for answer in answers]
    problems = []
    for failure in failures:
        problems += [Problem(**problem) for problem in failure["problems"]]
    kinds = {failure["kind"] for failure in failures}
    error: type[RekindleError] = StepError
    if len(kinds) == 1:
        error = _ERRORS.get(kinds.pop(), StepError)
    raise error(list(dict.fromkeys(problems)))  # each once, however many items have it


class Local:
    """So many worker processes here; one item, or one worker, runs in this process."""

    apart = False

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def map(self, function: str, order: Order, items: Sequence[Any], work: str) -> list[Any]:
        answers: dict[int, Answer] = {}
        self.each(function, order, items, range(len(items)), answers.__setitem__)
        return _values([answers[number] for number in sorted(answers)])

    def each(
        self,
        function: str,
        order: Order,
        items: Sequence[Any],
        numbers: Sequence[int],
        then: Callable[[int, Answer], None],
    ) -> None:
        """Work on the items with these `numbers`; each answer is given to `then` once it
        is there. After many failures no further items begin."""
        size = min(self.workers, len(numbers))
        lock = threading.Lock()
        queue = iter(numbers)
        done = 0
        failed = 0
        logged_at = time.monotonic()

        def serve(ask: Callable[[Any], Answer]) -> None:
            nonlocal logged_at, done, failed
            while True:
                with lock:
                    # under the lock, as threads must not share an iterator
                    number = next(queue, None) if failed < _MOST_FAILED else None
                if number is None:
                    return
                answer = ask(items[number])
                with lock:
                    then(number, answer)
                    beat()
                    done += 1
                    if "value" not in answer:
                        failed += 1
                    if time.monotonic() - logged_at > _LOG_SECONDS:
                        logged_at = time.monotonic()
                        log.info("%s: %d of %d", function.rpartition(":")[2], done, len(numbers))

        if size <= 1:
            serve(functools.partial(call, function, order))
            return
        with contextlib.ExitStack() as team:
            workers = [_Worker(function, order) for _ in range(size)]
            threads = team.enter_context(concurrent.futures.ThreadPoolExecutor(size))
            for worker in workers:  # ends before the threads do, which wait for it
                team.callback(worker.end)
            for served in [threads.submit(serve, worker.ask) for worker in workers]:
                served.result()


class _Worker:
    """One process at a time, started when it is asked, and again when it was killed."""

    def __init__(self, function: str, order: Order) -> None:
        self._function = function
        self._first_line = json.dumps([function, order])
        self._process: subprocess.Popen[str] | None = None

    def ask(self, item: Any) -> Answer:
        """What `call` answers; an item whose process was killed is tried once more."""
        code = 0
        for _ in range(_TRIES):
            if self._process is None:
                self._process = self._start()
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(item) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if line:
                return dict(json.loads(line))
            code = process.wait()
            self.end()
            self._process = None
        how = f"ended (exit {code})"
        fix = "see its output above"
        if code < 0:
            how = f"was killed by signal {-code}"
            # SIGKILL is what the kernel sends where memory ends
            is_out_of_memory = code == -signal.SIGKILL
            fix = "set data.workers to fewer, or use smaller texts" if is_out_of_memory else ""
        return _failure([_worker_problem(self._function.rpartition(":")[2], how, fix)])

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(OSError), self._process:  # closes its pipes
                pass

    def _start(self) -> subprocess.Popen[str]:
        path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
        # one thread a worker: there are as many workers as cores
        alone = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **alone},
            text=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(self._first_line + "\n")
        return process


class Nodes:
    """The nodes of this step, which share a store: each works on every n-th item, and all
    see all results. A step that runs again goes on with what is there."""

    apart = False

    def __init__(self, local: Local, store: PieceStore, place: Rendezvous) -> None:
        self.local = local
        self.store = store
        self.place = place

    def map(self, function: str, order: Order, items: Sequence[Any], work: str) -> list[Any]:
        answered = self.store.answered(work)
        own_numbers = range(self.place.node_rank, len(items), self.place.nodes)
        failed: list[Answer] = []

        def then(number: int, answer: Answer) -> None:
            if "value" in answer:
                self.store.answer(work, number, answer["value"])
            else:
                failed.append(answer)

        open_numbers = []
        for number in own_numbers:
            if number not in answered or self._is_lost(items[number]):
                open_numbers.append(number)
        self.local.each(function, order, items, open_numbers, then)
        _values(failed)  # raises: the step ends on all nodes
        self._wait(work, items, answered.difference(own_numbers))
        return self.store.answers(work, len(items))

    def _is_lost(self, item: Any) -> bool:
        """Whether the entry that an earlier run made of an item was removed since."""
        return isinstance(item, dict) and self.store.find(item["key"]) is None

    def _wait(self, work: str, items: Sequence[Any], old: set[int]) -> None:
        """Wait for the results of all items;
        `old` ones may name entries that are gone."""
        answered = set[int]()
        since = time.monotonic()
        while True:
            old = {number for number in old if self._is_lost(items[number])}
            answered_now = self.store.answered(work) - old
            if len(answered_now) > len(answered):
                answered = answered_now
                since = time.monotonic()
            if len(answered) == len(items):
                return
            if time.monotonic() - since > self.place.patience_seconds:
                missing = sorted(set(range(len(items))) - answered)
                nodes = sorted({number % self.place.nodes for number in missing})
                raise StepError(
                    f"{len(missing)} of {len(items)} items have no result, such as {missing[0]}",
                    where=f"node {', '.join(map(str, nodes))}",
                    fix="see the logs of these nodes; the next run goes on from what is there",
                )
            time.sleep(POLL_SECONDS)
            beat()


def code() -> list[str]:
    """What the bytes of pieces and shards depend on beside data and settings: rekindle's
    own code, and the libraries that decode and encode."""
    versions = [source_hash(TRAINING)]
    for name in ("numpy", "pillow", "pyarrow", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return versions


def facts(order: Order, item: Any) -> list[str]:
    """What has to be the same on a cluster: Python's version, and rekindle's own code."""
    return [".".join(map(str, sys.version_info[:2])), source_hash(TRAINING)]


class _Cluster:
    """What Ray and Spark share: their workers have to run the code that is here."""

    name = ""
    apart = True

    def map(self, function: str, order: Order, items: Sequence[Any], work: str) -> list[Any]:
        return _values(self.answers(function, order, items))

    def answers(self, function: str, order: Order, items: Sequence[Any]) -> list[Answer]:
        raise NotImplementedError

    def checked(self) -> None:
        """Raise RequestError for a cluster that cannot be reached or runs other code."""
        try:
            (their_facts,) = _values(self.answers(f"{_MODULE}:facts", {}, [None]))
        except Exception as error:  # what drivers raise has no common base
            raise RequestError(
                f"{self.name} cannot run rekindle: {_cause(error)}",
                where="data.executor",
                fix="check data.executor_address, and that its workers have rekindle's image",
            ) from error
        names = ("Python", "rekindle's code")
        for name, ours, theirs in zip(names, facts({}, 0), their_facts, strict=True):
            if ours != theirs:
                raise RequestError(
                    f"{name} is {theirs} on {self.name} and {ours} here",
                    where="data.executor",
                    fix="run both from the same image",
                )


def _cause(error: Exception) -> str:
    """The line of a driver's report that names an exception, or how the report begins."""
    named = re.findall(r"^\w*(?:Error|Exception): .+", str(error), re.MULTILINE)
    line = named[-1] if named else " ".join(str(error).split())
    return line[:_CAUSE_LENGTH]


class Ray(_Cluster):
    """Tasks of Ray Core on the cluster at `address`, or on one of its own here."""

    name = "Ray"

    def __init__(self, address: str) -> None:
        import ray

        self._ray = ray
        if not ray.is_initialized():
            ray.init(address=address or None, log_to_driver=False, include_dashboard=False)
        self.checked()

    def answers(self, function: str, order: Order, items: Sequence[Any]) -> list[Answer]:
        run = self._ray.remote(max_retries=3)(call)
        shared_order = self._ray.put(dict(order))
        return list(self._ray.get([run.remote(function, shared_order, item) for item in items]))


class Spark(_Cluster):
    """Tasks of Spark: of the session that there is, or of one at the master `address`."""

    name = "Spark"

    def __init__(self, address: str) -> None:
        from pyspark.sql import SparkSession

        if not address or address.startswith("local"):  # its workers would run PATH's python3
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.appName("rekindle")
        builder = builder.config("spark.ui.showConsoleProgress", False)
        if address:
            builder = builder.master(address)
        self._context = builder.getOrCreate().sparkContext
        self.checked()

    def answers(self, function: str, order: Order, items: Sequence[Any]) -> list[Answer]:
        distributed = self._context.parallelize(items, len(items))
        answers: list[Answer] = distributed.map(lambda item: call(function, order, item)).collect()
        return answers


_CLUSTERS: Mapping[str, Callable[[str], _Cluster]] = {"ray": Ray, "spark": Spark}


def _reach(address: str) -> None:
    """Raise RequestError where nothing listens at an address: drivers try for minutes."""
    host_and_port = re.fullmatch(r"(?:\w+://)?([\w.-]+):(\d+)", address)
    if not host_and_port:
        return
    host, port = host_and_port.groups()
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise RequestError(
            f"nothing answers at {address}: {error}",
            where="data.executor_address",
            fix="check the address, the network, and that the cluster runs",
        ) from None


def executor_of(data: DataSpec, store: PieceStore, worth: int) -> Executor:
    """The executor that `data.executor` asks for, with at most one worker a core, and as
    many as the work is `worth`, where `data.workers` leaves it open; RequestError where
    there is none."""
    if data.executor in _CLUSTERS:
        return _cluster_of(data)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    local = Local(data.workers or max(1, min(cores or 1, worth)))
    if local.workers > 1 and not data.workers:
        log.info("%d processes share the work, by its size; data.workers sets them", local.workers)
    place = Rendezvous.current()
    return Nodes(local, store, place) if place.nodes > 1 else local


def _cluster_of(data: DataSpec) -> Executor:
    """The cluster of `data.executor`;
    RequestError where it does not answer, or is missing."""
    address = os.environ.get(data.executor_address or "", "")
    if data.executor_address and not address:
        raise RequestError(
            f"the variable {data.executor_address} is not set",
            where="data.executor_address",
            fix="set it to the address of the cluster",
        )
    _reach(address)
    try:
        return _CLUSTERS[data.executor](address)
    except ImportError as error:
        raise RequestError(
            f"{error.name} is not installed",
            where="data.executor",
            fix=f"pip install 'rekindle[{data.executor}]'",
        ) from None
    except RekindleError:
        raise
    except Exception as error:  # what drivers raise has no common base
        raise RequestError(
            f"no {data.executor} cluster answers: {_cause(error)}",
            where="data.executor_address",
            fix="check the address and the network",
        ) from error


def _main() -> None:
    """Answer items, a line of JSON each, until there are no more; prints go to stderr."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    function, order = json.loads(sys.stdin.readline())
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "w") as answers:
        for line in sys.stdin:
            answers.write(json.dumps(call(function, order, json.loads(line))) + "\n")
            answers.flush()


if __name__ == "__main__":
    _main()
