#!/usr/bin/env bash
# Install mori-mp into .venv and run the whole pipeline on this machine: the three stages of the shipped
# Qwen3-Omni deploy file, each with its control process and transfer workers, over host memory (engine `shm`).
# No GPU and no model is needed; the payloads are generated, and every byte that arrives is checked.
#
# Two runs: one with the default deliveries (small payloads ride in the notice, large ones are read in place),
# one in which every chunk is written by a transfer worker. Exit status: that of the first run that fails.
#
# PYTHON and TORCH_SPEC: see venv.sh. Arguments are passed on to `mori-mp pipeline`.
set -euo pipefail
# shellcheck source=scripts/venv.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh"

ensure_venv cli

run() {
    "$VENV/bin/mori-mp" pipeline --deploy-config "$ROOT/deploy/qwen3_omni_moe_mori_intranode.yaml" \
        --backend shm --pool-size 128MiB --show-processes "$@"
}

echo "== default deliveries: eager and lease"
run "$@"
echo
echo "== every chunk through a transfer worker: landing"
run --delivery landing --eager-bytes 0 "$@"
