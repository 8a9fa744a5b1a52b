"""Makes the environment of `make test-oldest`: `python tests/train/make_oldest.py TARGET SHARED`.

TARGET becomes a virtual environment that holds the oldest torch and takes everything else from the environment SHARED. The package
index has that torch with CUDA, and linked to 4 GB of NVIDIA's libraries, which a test on a CPU never calls. They are replaced by empty
libraries of the same names, and torch is loaded with lazy binding, so that their functions are looked for when they are called: never.
"""

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements-oldest.txt"
SHARE = (
    """import os, sys, site; sys.setdlopenflags(os.RTLD_LAZY); site.addsitedir({packages!r})\n"""
)


def main(target: Path, shared: Path) -> None:
    if shutil.which("gcc") is None or shutil.which("readelf") is None:
        sys.exit("make test-oldest needs gcc and readelf for empty libraries: apt-get install gcc")
    venv.create(target, with_pip=True, clear=True)
    python = target / "bin" / "python"
    install = [
        python,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
        "-r",
        REQUIREMENTS,
    ]
    subprocess.run(install, check=True)
    folder = next(target.glob("lib/python3*/site-packages"))
    packages = next(shared.glob("lib/python3*/site-packages"))
    (folder / "zz_shared.pth").write_text(SHARE.format(packages=str(packages.resolve())))
    for name in unmet(folder):
        subprocess.run(
            [
                "gcc",
                "-shared",
                "-x",
                "c",
                "/dev/null",
                f"-Wl,-soname,{name}",
                "-o",
                folder / "torch/lib" / name,
            ],
            check=True,
        )


def unmet(folder: Path) -> set[str]:
    """Libraries of NVIDIA that torch's own link to and nothing here provides."""
    libraries = list((folder / "torch" / "lib").glob("*.so*"))
    told = subprocess.run(["readelf", "-d", *libraries], check=True, capture_output=True, text=True)
    needed = set(re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl).*)\]", told.stdout))
    return needed - {path.name for path in folder.rglob("lib*.so*")}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
