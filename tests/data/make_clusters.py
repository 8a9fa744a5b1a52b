"""Makes the environment of `make test-clusters`: `python tests/data/make_clusters.py TARGET SHARED`.

TARGET has Ray and Spark, and takes everything else from the environment SHARED, whose packages come
first."""

import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements-clusters.txt"


def main(target: Path, shared: Path) -> None:
    venv.create(target, with_pip=True, clear=True)
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-compile", "-r", REQUIREMENTS]
    subprocess.run([target / "bin" / "python", *install], check=True)
    folder = next(target.glob("lib/python3*/site-packages"))
    packages = next(shared.glob("lib/python3*/site-packages"))
    (folder / "shared.pth").write_text(f"{packages.resolve()}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
