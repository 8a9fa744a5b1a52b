#!/bin/sh
# Fills /opt/rekindle, a virtual environment, while an image is built:
#   install.sh torch [PYTHON] [FILE]         that PYTHON's torch, if it has one, is in FILE's range
#   install.sh locked HELD LOCK              what of a lock a base that HOLDS packages lacks
#   install.sh packages [WORDS FOR venv]     what steps import, as containers/*.lock say
#   install.sh bytecode                      of that
#   install.sh rekindle                      rekindle itself, from /source; then pip goes
# Wheels come from /wheelhouse where it holds some (no network then), otherwise from pip's index.
# What the base image has already stays as it is: the lock does not touch it.
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
    "${1:-python3}" - "${2:-/containers/requirements.txt}" <<'END'
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

# The lines of a lock without those of packages that a base image HOLDS (pip's freeze), whose versions
# stay; with its torch stay the CUDA packages that torch would bring. TORCH, such as
# "torch==2.13.0+cpu --hash=sha256:...", takes torch's place and brings none.
locked() {
    awk -F'[=@ ;]' -v own="${TORCH:-}" '
        { name = tolower($1); gsub(/[._]/, "-", name) }
        FILENAME == ARGV[1] { held[name]; next }
        /^[A-Za-z0-9]/ {
            keeps = !(name in held)
            if (("torch" in held || own != "") && name ~ /^(torch|triton|cuda-.*|nvidia-.*)$/) keeps = 0
        }
        keeps
        END { if (own != "" && !("torch" in held)) print own }' "$1" "$2"
}

# pip may choose nothing: all is in the lock, with its hash. The wheelhouse was filled with hashes
# checked (build.sh), but for torch and kfp, which may be other builds there.
take() {
    if [ -n "$from" ]; then
        sed -n 's/^\([A-Za-z0-9][^\\]*\).*/\1/p' "$1" >/tmp/names
        # shellcheck disable=SC2086 # words
        pip install --no-compile $from --no-deps -r /tmp/names
    else
        pip install --no-compile --require-hashes --only-binary :all: --no-deps -r "$1"
    fi
}

packages() {
    torch
    python3 -m venv "$@" "$prefix"
    pip list --format=freeze >/tmp/held
    [ -z "$from" ] || TORCH="${TORCH:-torch}" # the one that is there
    locked /tmp/held /containers/requirements.lock >/tmp/locked
    take /tmp/locked
    take /containers/kfp.lock # its executor needs none of its dependencies
    deepspeed
    for more in ${MORE:-}; do # tensorflow, megatron
        locked /tmp/held "/containers/$more.lock" >/tmp/locked
        take /tmp/locked
    done
    rm -f /tmp/held /tmp/locked /tmp/names
}

# Sources alone are published; nothing of them is compiled, which needs no torch.
deepspeed() {
    if [ -n "$from" ]; then
        take /containers/deepspeed.lock
        return
    fi
    tools /containers/build.lock
    DS_BUILD_OPS=0 /tmp/build/bin/python3 -m pip --disable-pip-version-check wheel --no-cache-dir --require-hashes \
        --no-deps --no-build-isolation --wheel-dir /tmp/deepspeed -r /containers/deepspeed.lock
    pip install --no-compile --no-index --no-deps /tmp/deepspeed/*.whl
    rm -r /tmp/deepspeed /tmp/build
}

# What builds packages, apart from what steps import.
tools() {
    python3 -m venv /tmp/build
    (python=/tmp/build/bin/python3 && take "$1")
}

# No user may write it later. Of transformers' models a step imports one or two,
# and packages carry templates that are no Python yet.
bytecode() {
    "$python" -m compileall -q -j 0 -x 'transformers/models/|/tests/' "$prefix/lib" >/dev/null || true
}

# The tools that build rekindle come by the lock, too, and go again.
rekindle() {
    tools /source/containers/build.lock
    /tmp/build/bin/python3 -m pip wheel --no-index --no-deps --no-build-isolation \
        --wheel-dir /tmp/rekindle /source
    pip install --no-index --no-deps /tmp/rekindle/*.whl
    pip uninstall --yes pip
    rm -r /tmp/rekindle /tmp/build
}

command="$1"
shift
"$command" "$@"
