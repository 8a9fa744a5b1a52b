#!/bin/sh
# Becomes the command, which thus is process 1 and gets the signals itself.
set -eu
if [ -r /usr/local/gib/scripts/set_nccl_env.sh ]; then
    # what Google's plugin wants NCCL to be told
    # shellcheck disable=SC1091 # only where it is installed
    . /usr/local/gib/scripts/set_nccl_env.sh
fi
if [ "${1:-}" = serve ] || [ -n "${REKINDLE_SERVE:-}" ]; then
    # what SageMaker runs, and deployments on other platforms ask for; Azure ML sets variables only
    exec python3 -P -m rekindle.serve.container
fi
exec "$@"
