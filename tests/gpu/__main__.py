"""The checks of a GPU, as a table: `python -m tests.gpu [--only optimizer,varlen] [--out FOLDER] [--write docs/gpu.md]`.

Leaves FOLDER/<check>.json, FOLDER/<check>.log and FOLDER/gpu.md, the table of all results in the folder, so that several runs add
up. `--table` runs nothing and only writes the table. `--tiny` runs all code on a CPU with tiny models, and judges what a CPU can.
Ends with 1 if a row failed, with 2 where there is no GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tests.gpu import runner, table
from tests.gpu.here import Here


def options() -> argparse.ArgumentParser:
    """What the command line takes."""
    words = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=(__doc__ or "").partition("\n\n")[2]
    )
    words.add_argument(
        "--only", default=",".join(runner.CHECKS), help="names of checks, joined by commas"
    )
    words.add_argument("--out", type=Path, default=Path("gpu-checks"))
    words.add_argument("--write", type=Path, help="a page with the marks of docs/gpu.md")
    words.add_argument("--table", action="store_true")
    words.add_argument("--tiny", action="store_true")
    words.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda, with --tiny cpu")
    words.add_argument("--child", help=argparse.SUPPRESS)
    return words


def main() -> int:
    words = options()
    given = words.parse_args()
    here = Here.of(given.device or ("cpu" if given.tiny else "cuda"), given.tiny)
    if given.child:
        runner.child(given.child.split(","), here)
    names = given.only.split(",")
    unknown = [name for name in names if name not in runner.CHECKS]
    if unknown:
        words.error(f"no checks {', '.join(unknown)}; there are {', '.join(runner.CHECKS)}")
    if here.cuda and not torch.cuda.is_available() and not given.table:
        print("no CUDA device here; --tiny runs the checks' code on the CPU")
        return 2
    failed = 0
    for name in names if not given.table else ():
        print(f"{runner.CHECKS[name].title}:", flush=True)
        result = runner.run(name, here, given.out / f"{name}.log")
        result.write(given.out)
        failed += len(result.failed)
        for row in result.rows:
            print(f"  {row.result:<20} {row.seen}: {row.figure}", flush=True)
        print(f"  {result.seconds:.0f} s of {runner.CHECKS[name].seconds}", flush=True)
    text = table.markdown(table.read_all(given.out, list(runner.CHECKS)), runner.TITLES)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.md").write_text(text + "\n")
    if given.write:
        table.write_into(given.write, text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
