#!/bin/bash
# Debian 12 with Python as an archive for `docker import`: base.sh ARCHIVE. Needs root. Not
# debootstrap, which takes twice as long for the same packages.
set -euo pipefail
archive=$1
if ! command -v mmdebstrap >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq mmdebstrap debian-archive-keyring >/dev/null
fi
mkdir -p "$(dirname "$archive")"
mmdebstrap --quiet --variant=apt --include=python3-venv,ca-certificates,openmpi-bin \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' bookworm "$archive"
