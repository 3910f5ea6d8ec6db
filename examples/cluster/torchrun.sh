#!/bin/bash
# One host, or the same line on each of several: NNODES=2 HEAD=first-host bash examples/cluster/torchrun.sh
# Arguments are those of train.py.
set -euo pipefail

if [ "${NNODES:-1}" -eq 1 ]; then
    exec torchrun --standalone --nproc-per-node "${NPROC:-2}" examples/cluster/train.py "$@"
fi
exec torchrun \
    --nnodes "$NNODES" \
    --nproc-per-node "${NPROC:-1}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${HEAD:?the name of the first host}:29500" \
    examples/cluster/train.py "$@"
