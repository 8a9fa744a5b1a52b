"""What has to be true of a home after whatever was done to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from rekindle.app.runs import all_runs
from rekindle.records import HistoryRow, RunRecord
from tests.torture.chaos import left_in


class Failure(AssertionError):
    """Something is not as it has to be."""


class Version(NamedTuple):
    """A version of the registry."""

    number: str
    tags: dict[str, str]


def readable(home: Path, damaged: int = 0) -> list[RunRecord]:
    """All records in order; a Failure where more than `damaged` cannot be read."""
    known = len([path for path in (home / "runs").iterdir() if (path / "run.json").exists()])
    records = all_runs(home)
    if len(records) + damaged < known:
        raise Failure(f"{known - len(records)} of {known} records cannot be read")
    return records


def nothing_left(folder: Path, seconds: float = 20.0) -> None:
    """A Failure where processes go on working in a folder."""
    end = time.monotonic() + seconds
    while left := left_in(folder):
        if time.monotonic() > end:
            shown = []
            for process in left:
                with contextlib.suppress(psutil.Error):
                    shown.append((process.pid, process.status(), process.cmdline()))
            raise Failure(f"processes are left: {shown}")
        time.sleep(0.05)


def weights_of(record: RunRecord) -> str:
    """The hash of the weights that a run trained, or took from the cache: of the file itself."""
    model = record.step("finetune").artifacts["network"]
    return hashlib.sha256((Path(model.uri) / "model.safetensors").read_bytes()).hexdigest()


def losses_of(record: RunRecord) -> list[float]:
    """The curve, a loss a step."""
    folder = Path(record.step("finetune").artifacts["training"].uri)
    rows = (folder / "history.jsonl").read_text().splitlines()
    return [HistoryRow.model_validate_json(row).loss for row in rows]


def embedded(home: Path, name: str) -> tuple[list[Version], dict[str, str]]:
    """Versions and aliases of a model in the embedded registry, whose pages are sound."""
    with closing(sqlite3.connect(home / "mlflow.db", timeout=30)) as database:
        (sound,) = database.execute("pragma integrity_check").fetchone()
        if sound != "ok":
            raise Failure(f"mlflow.db: {sound}")
        versions = []
        asked = "select version from model_versions where name = ? order by version"
        for (number,) in database.execute(asked, (name,)).fetchall():
            of = "select key, value from model_version_tags where name = ? and version = ?"
            versions.append(Version(str(number), dict(database.execute(of, (name, number)))))
        asked = "select alias, version from registered_model_aliases where name = ?"
        aliases = {alias: str(version) for alias, version in database.execute(asked, (name,))}
    return versions, aliases


def served(url: str, name: str) -> tuple[list[Version], dict[str, str]]:
    """The same of a server."""
    model = _asked(f"{url}/api/2.0/mlflow/registered-models/get?name={name}")["registered_model"]
    query = f"filter=name%3D%27{name}%27&max_results=100"
    found = _asked(f"{url}/api/2.0/mlflow/model-versions/search?{query}").get("model_versions", [])
    versions = [
        Version(str(one["version"]), {tag["key"]: tag["value"] for tag in one.get("tags", [])})
        for one in found
    ]
    aliases = {one["alias"]: str(one["version"]) for one in model.get("aliases", [])}
    return sorted(versions, key=lambda v: int(v.number)), aliases


def _asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def by_evidence(versions: list[Version], aliases: dict[str, str]) -> None:
    """The champion and those before it are a chain: each was compared with the one before."""
    tags = {version.number: version.tags for version in versions}
    promoted = {n for n, t in tags.items() if t.get("rekindle.decision") == "promoted"}
    champion = aliases.get("champion", "")
    walked = list(_chain(tags, champion))
    if champion and champion not in promoted:
        raise Failure(f"version {champion} is champion, its decision {tags[champion]}")
    if {*walked} != promoted or len(walked) != len({*walked}):
        raise Failure(f"promoted are {promoted}, but {champion} beat {walked}")
    keys = [t["rekindle.run_key"] for t in tags.values()]
    if len({*keys}) != len(keys):
        raise Failure(f"two versions of one training: {keys}")


def _chain(tags: dict[str, dict[str, str]], champion: str) -> Iterator[str]:
    for _ in range(len(tags) + 1 if champion else 0):  # a circle is walked once, and a step more
        yield champion
        champion = tags[champion].get("rekindle.beaten", "")
        if champion not in tags:
            return
