#!/bin/bash
# Builds images as far as this machine can and prints name, id and size of each: build.sh [cpu] [train] [vllm]
# `cpu-tensorflow` or `train-megatron` is such an image with what that lock in containers/ names beside.
# An image's base is CPU_BASE, TRAIN_BASE or VLLM_BASE, or what its Dockerfile says. Where no registry can be
# reached, the cpu image gets a base that mmdebstrap makes (as root), and its packages come from
# containers/wheelhouse, without a network. BUILD_ARGS are more words for docker build:
#   BUILD_ARGS="--build-arg EFA_VERSION=1.51.0 --build-arg EFA_SHA256=..." containers/build.sh train
# With RELEASE=1 nothing is built but on a base that is named by its digest, from packages by hash.
set -euo pipefail
cd "$(dirname "$0")/.."
docker=docker
if [ -x /usr/bin/docker ]; then
    docker=/usr/bin/docker  # Debian's, as old as its daemon
fi
export DOCKER_BUILDKIT=1
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
commit=$(git rev-parse HEAD 2>/dev/null || true)

default_base() {
    sed -n 's/^ARG BASE_IMAGE=//p' "containers/$1/Dockerfile"
}

is_here() {
    "$docker" image inspect "$1" >/dev/null 2>&1 || timeout 900 "$docker" pull -q "$1" >/dev/null 2>&1
}

made_base() {
    local name
    name=rekindle-base:bookworm-$(sha256sum containers/base.sh | cut -c1-12)
    if ! "$docker" image inspect "$name" >/dev/null 2>&1; then
        bash containers/base.sh build/base.tar 1>&2
        "$docker" import build/base.tar "$name" >/dev/null
        rm build/base.tar
    fi
    echo "$name"
}

# the wheels of what is pinned, as .venv's pip finds them; again when the pins change
fill_wheelhouse() {
    local wheels=containers/wheelhouse
    local mark
    mark=$(cat containers/{requirements,kfp,deepspeed,build}.lock | sha256sum | cut -d' ' -f1)
    if [ "$(cat $wheels/.filled 2>/dev/null)" != "$mark" ]; then
        find "$wheels" -name '*.whl' -delete
        local pinned
        pinned=$(mktemp)
        echo torch >"$pinned.held"
        sh containers/install.sh locked "$pinned.held" containers/requirements.lock >"$pinned"
        for lock in "$pinned" containers/build.lock; do
            fetch -r "$lock"
        done
        # another build than PyPI's, where this machine's pip has one
        .venv/bin/python -m pip download -q --only-binary :all: --no-deps -d "$wheels" -c constraints.txt torch
        .venv/bin/python -m pip wheel -q --no-deps -w "$wheels" -c constraints.txt kfp
        .venv/bin/python -m pip wheel -q --no-deps -w "$wheels" -c constraints.txt deepspeed
        rm "$pinned" "$pinned.held"
        echo "$mark" >"$wheels/.filled"
    fi
    if [ -n "$1" ]; then # pip leaves what is there already
        fetch -r "containers/$1.lock"
    fi
}

fetch() {
    .venv/bin/python -m pip download -q --only-binary :all: --no-deps --require-hashes -d "$wheels" "$@"
}

build() {
    local base=$1
    shift
    "$docker" build -q -f "containers/$image/Dockerfile" -t "rekindle-$name" "$@" \
        --build-arg "BASE_IMAGE=$base" --build-arg "VERSION=$version" --build-arg "MORE=$more" \
        --build-arg "COMMIT=$commit" . >/dev/null
    "$docker" image inspect "rekindle-$name" \
        --format "rekindle-$name {{.Id}} {{.Size}}" | awk '{ printf "%s %s %d MB\n", $1, $2, $3 / 1e6 }'
}

for name in "${@:-cpu}"; do
    image=${name%%-*}
    more=${name#"$image"}
    more=${more#-}
    asked=$(echo "${image}_BASE" | tr '[:lower:]' '[:upper:]')
    base=${!asked:-$(default_base "$image")}
    if [ -n "${RELEASE:-}" ] && ! [[ $base =~ @sha256:[0-9a-f]{64}$ ]]; then
        echo "rekindle-$name is not built: a release needs its base $base by digest" >&2
        echo "  fix: $asked=NAME@sha256:..., as docker image inspect NAME shows it in RepoDigests" >&2
        exit 2
    fi
    if is_here "$base"; then
        # shellcheck disable=SC2086 # words
        build "$base" --build-arg "PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-}" \
            --build-arg "TORCH=${TORCH:-}" ${BUILD_ARGS:-}
    elif [ "$image" = cpu ] && [ -z "${CPU_BASE:-}" ] && [ -z "${RELEASE:-}" ]; then
        fill_wheelhouse "$more" &
        base=$(made_base)
        wait $!
        build "$base" --network=none
    else
        echo "rekindle-$name is not built: its base $base cannot be had" >&2
        [ -z "${!asked:-}" ]
    fi
done
