#!/bin/sh
# Fills /opt/rekindle, a virtual environment, while an image is built:
#   install.sh torch [PYTHON] [FILE]         that PYTHON's torch, if it has one, is in FILE's range
#   install.sh packages [WORDS FOR venv]     what steps import
#   install.sh bytecode                      of that
#   install.sh rekindle                      rekindle itself, from /source; then pip goes
# Wheels come from /wheelhouse where it holds some (no network then), otherwise from pip's index.
# What the base image has already stays as it is: constraints do not touch it.
set -eu
prefix=/opt/rekindle
python="$prefix/bin/python3"
pip() {
    "$python" -m pip --disable-pip-version-check --no-cache-dir "$@"
}
from=""
if ls /wheelhouse/*.whl >/dev/null 2>&1; then
    from="--no-index --find-links=/wheelhouse"
fi

# The base's torch stays, so one that rekindle does not run on has to be refused here. NGC's are
# pre-releases of their version, such as 2.10.0a0+b4e4ee8, which pip would not count as 2.10.
torch() {
    "${1:-python3}" - "${2:-/requirements.txt}" <<'END'
import importlib.metadata
import re
import sys

try:
    found = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit()
with open(sys.argv[1]) as file:
    low, high = re.search(r"^torch>=(\d+\.\d+)\S*,<(\d+\.\d+)", file.read(), re.MULTILINE).groups()
parts = [tuple(map(int, re.match(r"(\d+)\.(\d+)", version).groups())) for version in (low, found, high)]
if not parts[0] <= parts[1] < parts[2]:
    sys.exit(
        f"the base image has torch {found}, and rekindle runs on {low} up to, but not including, {high}\n"
        "  fix: set BASE_IMAGE to an image whose torch is in this range, or to one without torch"
    )
END
}

packages() {
    torch
    python3 -m venv "$@" "$prefix"
    pip list --format=freeze >/tmp/held
    awk -F'[=@ ]' '
        { name = tolower($1); gsub(/[._]/, "-", name) }
        NR == FNR { held[name]; next }
        !(name in held)' /tmp/held /constraints.txt >/tmp/constraints.txt
    # shellcheck disable=SC2086 # words
    pip install --no-compile $from -c /tmp/constraints.txt -r /requirements.txt
    # its executor needs none of its dependencies
    # shellcheck disable=SC2086
    pip install --no-compile $from -c /tmp/constraints.txt --no-deps kfp
    rm /tmp/held /tmp/constraints.txt
}

# Nobody may write it later. Of transformers' models a step imports one or two,
# and packages carry templates that are no Python yet.
bytecode() {
    "$python" -m compileall -q -j 0 -x 'transformers/models/|/tests/' "$prefix/lib" >/dev/null || true
}

rekindle() {
    # shellcheck disable=SC2086
    pip wheel $from --no-deps --wheel-dir /tmp/rekindle /source
    pip install --no-index --no-deps /tmp/rekindle/*.whl
    pip uninstall --yes pip
    rm -r /tmp/rekindle
}

command="$1"
shift
"$command" "$@"
