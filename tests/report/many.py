"""A home of many runs, and how long the verbs take in it: `python -m tests.report.many 10000`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rekindle.records import RunRecord
from tests.report.homes import Home
from tests.report.runs import promoted_digits


def many(root: Path, count: int) -> None:
    """A home of that many runs, which share the artifacts of one."""
    first = promoted_digits(Home(root))
    for number in range(2, count + 1):
        run_id = f"digits-{number:06d}"
        record = first.model_copy(update={"run_id": run_id, "number": number, "home": str(root)})
        (root / "runs" / run_id).mkdir()
        (root / "runs" / run_id / "run.json").write_text(record.to_json(indent=2))


def main() -> None:
    """Print the seconds of each verb, the first time and with the index."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        many(home, int(sys.argv[1]))
        for verb in ("runs", "runs", "status", "report", "report", "status"):
            began = time.monotonic()
            subprocess.run(
                [sys.executable, "-m", "rekindle.cli.main", verb, f"--home={home}"],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            print(f"{verb}: {time.monotonic() - began:.2f} s", flush=True)
        (home / "runs/digits-000002/run.json").touch()
        assert len(list((home / "runs").glob("*/run.json"))) == int(sys.argv[1])
        assert RunRecord.read(home / "runs/digits-000002/run.json").number == 2


if __name__ == "__main__":
    main()
