#!/bin/bash
# Debian 12 with Python as an archive for `docker import`: debootstrap.sh ARCHIVE. Needs root; made
# once, and kept.
set -euo pipefail
archive=$1
if [ -e "$archive" ]; then
    exit
fi
if ! command -v debootstrap >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq debootstrap >/dev/null
fi
mkdir -p "$(dirname "$archive")"
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3-venv,ca-certificates bookworm "$root" >"$archive.log"
tar -C "$root" --exclude=./var/cache/apt --exclude=./var/lib/apt/lists --exclude=./usr/share/doc \
    --exclude=./usr/share/man --exclude=./usr/share/locale -czf "$archive.part" .
mv "$archive.part" "$archive"
