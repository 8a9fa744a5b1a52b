"""Rounds of the whole shipped pipeline by the command line: training on two ranks, scores, a registry."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rekindle.records import RunRecord
from tests.servers.mlflow_server import mlflow_server
from tests.torture import chaos, oracle
from tests.torture.chaos import Chaos, files_in
from tests.torture.light import DISTURBED
from tests.torture.oracle import Failure, nothing_left

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 1_200.0  # a busy machine; and a claim of a killed attempt counts for two minutes
NEW = "steps did less than they should: "
CONFIG = """
name: m
task: image_classification
data: {source: "sklearn:digits"}
model: {source: {channels: [8, 16], hidden: 32, dropout: 0.1}}
train: {steps: %STEPS%, lr: 3e-3, global_batch_size: 64, grace_seconds: 5, checkpoint: {every: 10}}
evaluate: {floor: {accuracy: 0.05}, gate: {resamples: 200}}
platforms: {local: {ranks: 2}}
"""
STEPS = 60
REGISTRY = ("mlflow.db", "mlflow.db-journal", "mlartifacts")


class Run(subprocess.Popen[bytes]):
    """`rekindle run c.yaml` in a folder."""

    def __init__(self, home: Path, *words: str, limit: int = 0) -> None:
        self.home, number = home, time.time_ns()
        place = Path(tempfile.gettempdir())  # the home's disk may be full
        self.out, self.err = (place / f"torture-{number}.{end}" for end in ("out", "err"))
        command = ["-m", "rekindle.cli.main", "run", "c.yaml", f"--home={home}", "--json", *words]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            super().__init__(
                [sys.executable, *command],
                cwd=home.parent,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                preexec_fn=functools.partial(chaos.limit_file_size, limit) if limit else None,
            )

    def ended(self, codes: tuple[int, ...]) -> dict[str, Any]:
        """What it answered; a Failure where it did not end so."""
        try:
            code = self.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            tree = [(p.pid, p.status(), p.name()) for p in chaos.processes_of(self.pid)]
            raise Failure(f"a run hangs: {tree}; {self.err.read_text()[-2000:]}") from None
        said = self.err.read_text(errors="replace")
        if code not in codes or "Traceback (most" in said:
            raise Failure(f"a run ended with {code}, not one of {codes}:\n{said[-3000:]}")
        text = self.out.read_text(errors="replace")
        for file in (self.out, self.err):
            file.unlink()
        return dict(json.loads(text)) if text.strip() and code >= 0 else {}


class Heavy:
    """Rounds in a folder, held against one undisturbed run, which is kept there for the next time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole = folder / "whole" / "home"
        if not (folder / "whole.json").exists():
            shutil.rmtree(folder / "whole", ignore_errors=True)
            done = Run(self._fresh("whole", empty=True)).ended((0,))
            (folder / "whole.json").write_text(json.dumps(done))
        done = json.loads((folder / "whole.json").read_text())
        self.steps = {step["name"]: min(step["seconds"], 20.0) for step in done["steps"]}
        record = RunRecord.read(self.whole / "runs" / done["run_id"] / "run.json")
        self.weights, self.losses = oracle.weights_of(record), oracle.losses_of(record)
        self.metrics, self.bytes = (
            done["metrics"],
            sum(f.stat().st_size for f in files_in(self.whole)),
        )

    def _fresh(self, name: str, *, empty: bool = False) -> Path:
        """A folder with a config; the home in it may have a registry, which takes long to make."""
        home = self.folder / name / "home"
        home.parent.mkdir(parents=True)
        (home.parent / "c.yaml").write_text(CONFIG.replace("%STEPS%", str(STEPS)))
        if not empty:
            shutil.copytree(self.whole, home, ignore=lambda path, names: {*names} - {*REGISTRY})
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(home / "mlartifacts")
            _emptied(home / "mlflow.db")
        return home

    def round(self, seed: int, mishaps: Chaos, kind: str = "") -> Path:
        """One round; its folder."""
        kinds = {
            "kills": 4,
            "damage": 4,
            "together": 2,
            "server": 2,
            "full": 1,
            "limit": 1,
            "registry": 1,
        }
        name = kind or mishaps.random.choices(list(kinds), list(kinds.values()))[0]
        mishaps.log.append(f"heavy {name}")
        home = self._fresh(f"heavy-{seed}", empty=mishaps.random.random() < 0.3)
        act: Callable[[Path, Chaos], Path] = getattr(self, f"_{name}")
        return act(home, mishaps).parent

    def _kills(self, home: Path, mishaps: Chaos) -> Path:
        for _ in range(mishaps.random.randint(1, 3)):
            self._disturbed(home, mishaps)
            if home.exists() and mishaps.random.random() < 0.3:
                home = mishaps.moved(home)
        self._recovers(home, mishaps)
        return home

    def _disturbed(self, home: Path, mishaps: Chaos, *words: str) -> None:
        before = _records(home)
        run = Run(home, *words)
        mishaps.counts["runs"] += 1
        self._disturb(mishaps, [run], before)
        run.ended(DISTURBED)
        nothing_left(home.parent)

    def _disturb(self, mishaps: Chaos, runs: list[Run], before: set[Path]) -> None:
        """Do something to one of the runs, which have no record in `before`: when it starts, or
        some time after a step of it began."""
        run, step = mishaps.random.choice(runs), mishaps.random.choice(["", *self.steps])
        mishaps.log.append(f"in {step or 'the start'}:")

        def reached() -> bool:
            return not step or any(_is_running(path, step) for path in _records(run.home) - before)

        mishaps.disturb(run, self.steps.get(step, 5.0), reached)

    def _damage(self, home: Path, mishaps: Chaos) -> Path:
        if mishaps.random.random() < 0.6:
            self._disturbed(home, mishaps)
        else:
            Run(home).ended((0,))
        files = files_in(home, *REGISTRY, "locks", "lock") if home.exists() else []
        met = mishaps.damage(files) if files else []
        self._recovers(home, mishaps, damaged=[str(path) for path in met])
        return home

    def _together(self, home: Path, mishaps: Chaos) -> Path:
        words = mishaps.random.choice([(), ("--set", f"train.steps={STEPS // 2}")])
        before = _records(home)
        runs = [Run(home), Run(home, *words)]
        mishaps.counts["concurrent runs"] += len(runs)
        if mishaps.random.random() < 0.6:
            self._disturb(mishaps, runs, before)
        for run in runs:
            run.ended(DISTURBED)
        nothing_left(home.parent)
        Run(home, *words).ended((0, 1))  # one that was raced by another is refused, and says so
        self._recovers(home, mishaps, others=bool(words))
        return home

    def _server(self, home: Path, mishaps: Chaos) -> Path:
        """Two homes and one real MLflow server; one of them trains something else."""
        served = home.parent / "served"
        served.mkdir()
        other = home.with_name("other")
        with mlflow_server(served) as url:
            uri = ("--set", f"register.tracking_uri={url}")
            less = (*uri, "--set", f"train.steps={STEPS // 2}")
            runs = [Run(home, *uri), Run(other, *less)]
            mishaps.counts["concurrent runs"] += len(runs)
            self._disturb(mishaps, runs, set())
            for run in runs:
                run.ended(DISTURBED)
            for place, words in mishaps.random.sample([(home, uri), (other, less)], 2):
                began = time.monotonic()
                Run(place, *words).ended((0,))
                mishaps.counts.recoveries.append(time.monotonic() - began)
            oracle.by_evidence(*oracle.served(url, "m"))
            self._same(home)
        return home

    def _full(self, home: Path, mishaps: Chaos) -> Path:
        disk, size = home.parent / "disk", int(self.bytes * mishaps.random.uniform(0.05, 1.0))
        with chaos.small_disk(disk, size) as mounted:
            if not mounted:
                mishaps.counts.notes.add("no right to mount a small disk: skipped")
                return home
            mishaps.did("full disks", f"{size:,} bytes")
            shutil.copy(home.parent / "c.yaml", disk)
            there = disk / "home"
            if home.exists():
                with contextlib.suppress(OSError, shutil.Error):
                    shutil.copytree(home, there)
            Run(there).ended((0, 1))
            chaos.grow(disk)
            self._recovers(there, mishaps)
        return home

    def _limit(self, home: Path, mishaps: Chaos) -> Path:
        limit = mishaps.random.randint(20_000, 1_500_000)
        mishaps.did("limits on file size", f"{limit:,} bytes")
        Run(home, limit=limit).ended((0, 1))
        self._recovers(home, mishaps)
        return home

    def _registry(self, home: Path, mishaps: Chaos) -> Path:
        """A damaged champion is compared with nothing, and nothing is promoted over it."""
        Run(home).ended((0,))
        files = [f for f in files_in(home / "mlartifacts") if "network" in f.parts]
        kept = {file: file.read_bytes() for file in files}
        mishaps.damage(files)
        before = oracle.embedded(home, "m")[1]
        less = ("--set", f"train.steps={STEPS // 2}")
        changed = any(not f.exists() or f.read_bytes() != content for f, content in kept.items())
        answer = Run(home, *less).ended((1,) if changed else (0,))
        if changed and "version 1 of m" not in answer["errors"][0]["what"]:
            raise Failure(f"a damaged champion, and it said {answer}")
        if changed and oracle.embedded(home, "m")[1]["champion"] != before["champion"]:
            raise Failure("the champion changed")
        for file, content in kept.items():
            file.write_bytes(content)
        Run(home, *less).ended((0,))
        self._recovers(home, mishaps, others=True)
        return home

    def _recovers(
        self, home: Path, mishaps: Chaos, *, damaged: list[str] | None = None, others: bool = False
    ) -> None:
        """The same command once more leaves what the undisturbed run left; `others` says that the
        registry holds versions of another training, too."""
        nothing_left(home.parent)
        began = time.monotonic()
        run = Run(home)
        done = run.ended((0,))
        mishaps.counts.recoveries.append(time.monotonic() - began)
        nothing_left(home.parent)
        oracle.readable(home, len([path for path in damaged or () if path.endswith("run.json")]))
        curve = [path for path in damaged or () if path.endswith("history.jsonl")]
        self._same(home, run_id=done["run_id"], curve=not curve)
        if done["metrics"] != self.metrics and not others:
            raise Failure(f"metrics {done['metrics']} are not {self.metrics}")
        versions, aliases = oracle.embedded(home, "m")
        oracle.by_evidence(versions, aliases)
        if not others and ([v.number for v in versions], aliases) != (["1"], {"champion": "1"}):
            raise Failure(f"the registry holds {[v.number for v in versions]}, {aliases}")

    def _same(self, home: Path, run_id: str = "", *, curve: bool = True) -> None:
        runs = [run for run in oracle.readable(home, 9) if run.run_id == (run_id or run.run_id)]
        if oracle.weights_of(runs[-1]) != self.weights:
            raise Failure("the weights are not those of the undisturbed run")
        if curve and oracle.losses_of(runs[-1]) != self.losses:
            raise Failure(f"the curve has {len(oracle.losses_of(runs[-1]))} steps, or other losses")


def _records(home: Path) -> set[Path]:
    return set(home.glob("runs/*/run.json"))


def _is_running(path: Path, step: str) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return RunRecord.read(path).step(step).status == "running"
    return False


def _emptied(database: Path) -> None:
    """A registry without models and runs."""
    import sqlite3

    with contextlib.closing(sqlite3.connect(database)) as opened, opened:
        opened.execute("pragma foreign_keys = off")
        names = [
            n for (n,) in opened.execute("select name from sqlite_master where type = 'table'")
        ]
        for name in names:
            if name not in ("alembic_version", "workspaces"):
                kept = " where experiment_id != 0" if name == "experiments" else ""
                opened.execute(f"delete from {name}{kept}")
