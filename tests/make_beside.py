"""Makes an environment beside another: `python tests/make_beside.py TARGET SHARED REQUIREMENTS`.

TARGET holds what the file REQUIREMENTS names, without what that depends on, and takes everything else from the environment SHARED."""

import subprocess
import sys
import venv
from pathlib import Path


def main(target: Path, shared: Path, requirements: Path) -> None:
    venv.create(target, with_pip=True, clear=True)
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-compile", "-r", requirements]
    subprocess.run([target / "bin" / "python", *install], check=True)
    folder = next(target.glob("lib/python3*/site-packages"))
    packages = next(shared.glob("lib/python3*/site-packages"))
    (folder / "zz_shared.pth").write_text(
        f"import site; site.addsitedir({str(packages.resolve())!r})\n"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
