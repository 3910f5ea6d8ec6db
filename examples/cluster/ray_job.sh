#!/bin/bash
# A job on a Ray cluster that runs already: RAY_ADDRESS=http://head:8265 bash examples/cluster/ray_job.sh --epochs 30
# Ray packs this checkout for all hosts; torch, Ray and scikit-learn they must have. Arguments are those of train.py, and
# --workers and --storage of ray_train.py.
set -euo pipefail

exec ray job submit \
    --working-dir . \
    --runtime-env-json '{"py_modules": ["src/egeria"], "excludes": ["/.git", "/build", "/egeria_runs"]}' \
    -- python examples/cluster/ray_train.py "$@"
