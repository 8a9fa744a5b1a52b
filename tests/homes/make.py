"""Make the home that stands for this version: `python -m tests.homes.make`.

Three runs of a small pipeline, the second from the cache, with cache entries, an index and records.
Paths are those of a machine that does not exist, as in a home that was moved here."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import rekindle
from rekindle.cli.main import invoke
from tests.platforms.local.runs import run

HOMES = Path(__file__).parent
THERE = "/home/ada/.rekindle"
RUNS = {"digits-1": "abc", "digits-2": "abc", "digits-3": "abd"}
_OF_THE_MACHINE = ("lock", ".gc", "task.json", "result.json", "ephemeral_component.py")


def arguments(home: Path, text: str) -> dict[str, str]:
    """Of one run: its steps count how often they ran, in a folder of the home."""
    (home / "notes").mkdir(parents=True, exist_ok=True)
    return {"folder": str(home / "notes"), "text": text}


def main() -> None:
    """Run, leave out what this machine alone knows, and store the rest."""
    target = HOMES / rekindle.__version__
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve() / "home"
        for run_id, text in RUNS.items():
            run("chain", home, arguments(home, text), run_id=run_id)
        invoke(["runs", f"--home={home}"])
        for file in sorted(path for path in home.rglob("*") if path.is_file()):
            inside = file.relative_to(home)
            if file.name in _OF_THE_MACHINE or inside.parts[:2] == ("cache", "locks"):
                continue
            place = target / inside
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(_as_if_there(file.read_text().replace(str(home), THERE)))


def _as_if_there(text: str) -> str:
    """A cache entry's hash of itself is of its new paths; other text stays."""
    if '"sha256": ' not in text or '"facts": ' not in text:
        return text
    entry = json.loads(text)
    del entry["sha256"]
    sha256 = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
    return json.dumps({**entry, "sha256": sha256})


if __name__ == "__main__":
    main()
