#!/usr/bin/env bash
# Run the tests that need the real vLLM-Omni, in the environment that vllm_env.sh makes (VENV, VLLM_OMNI, VLLM:
# there). Arguments are passed on to pytest; those that name no tests leave it at these:
#
#     ./scripts/test_vllm.sh -v
#     ./scripts/test_vllm.sh tests/vllm_omni/test_chunks.py -k busy
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export VENV=${VENV:-$ROOT/.venv-vllm}
"$ROOT/scripts/vllm_env.sh"

cd -- "$ROOT"
# Besides tests/vllm_omni: what elsewhere compares itself with the host where that can be imported.
tests=(tests/vllm_omni tests/test_plugin.py tests/test_deploy_host.py tests/test_metrics.py)
for argument; do
    [[ ! -e ${argument%%::*} ]] || tests=()
done
# Stages are processes already: one test at a time. A host that cannot be imported is a failure here.
MORI_MP_REQUIRE_VLLM_OMNI=1 exec "$VENV/bin/python" -m pytest "${tests[@]}" "$@"
