#!/bin/bash
# Puts NCCL's ways into the networks of clouds into an image, as their makers document it, while it
# is built: network.sh efa VERSION | gib VERSION. Nothing happens without a version.
#   efa  libfabric and the OFI plugin of AWS. The kernel's module and limits are the host's.
#        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-changelog.html
#   gib  Google's NCCL/gIB for A3 Ultra, A4 and later.
#        https://docs.cloud.google.com/ai-hypercomputer/docs/nccl/release-notes-x86
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

efa() {
    local name=aws-efa-installer-$1.tar.gz
    if [ -z "${EFA_SHA256:-}" ]; then
        echo "the EFA installer $1 has no hash: it runs as root, so nothing is installed without one" >&2
        echo "  fix: fetch https://efa-installer.amazonaws.com/$name, check it with AWS's signature" >&2
        echo "       ($name.sig), and set EFA_SHA256 to what sha256sum says" >&2
        return 1
    fi
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends ca-certificates curl >/dev/null
    cd "$(mktemp -d)"
    curl -fsSL --retry 3 -o "$name" "https://efa-installer.amazonaws.com/$name"
    echo "$EFA_SHA256  $name" | sha256sum --check --quiet
    tar -xf "$name"
    cd aws-efa-installer
    ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify
    ls -d /opt/amazon/efa/lib* /opt/amazon/ofi-nccl/lib* /opt/amazon/ofi-nccl/lib*/*-linux-gnu \
        2>/dev/null >/etc/ld.so.conf.d/00-rekindle-efa.conf || true
    ldconfig
}

gib() {
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends ca-certificates curl gnupg >/dev/null
    curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg |
        gpg --dearmor -o /etc/apt/trusted.gpg.d/cloud.google.gpg
    echo "deb https://packages.cloud.google.com/apt gpudirect-gib-apt main" \
        >/etc/apt/sources.list.d/nccl-gib.list
    apt-get update -qq
    apt-get install -y -qq "nccl-gib=$1" "nccl-gib-plugins=$1" >/dev/null
    echo /usr/local/gib/lib64 >/etc/ld.so.conf.d/00-rekindle-gib.conf
    ldconfig
}

if [ -n "${2:-}" ]; then
    "$1" "$2"
    rm -rf /var/lib/apt/lists/* /tmp/*
fi
