#!/usr/bin/env bash
# Run the tests over the real vLLM-Omni, in the environment that vllm_env.sh makes (VENV, VLLM_OMNI, VLLM: there).
# Arguments are passed on to pytest:
#
#     ./scripts/test_vllm.sh
#     ./scripts/test_vllm.sh tests/vllm_omni/test_chunks.py -k busy
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export VENV=${VENV:-$ROOT/.venv-vllm}
"$ROOT/scripts/vllm_env.sh"

cd -- "$ROOT"
(($#)) || set -- tests/vllm_omni
# Stages are processes already: one test at a time. A host that cannot be imported is a failure here.
MORI_MP_REQUIRE_VLLM_OMNI=1 exec "$VENV/bin/python" -m pytest "$@"
