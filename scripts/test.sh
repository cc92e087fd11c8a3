#!/usr/bin/env bash
# Install mori-mp with what its tests need into .venv, and run them. Arguments are passed on to pytest:
#
#     ./scripts/test.sh
#     ./scripts/test.sh tests/test_ledger.py -k lease
#
# MORI_MP_TEST_JOBS: tests to run at once (default: one a core, at most 4). PYTHON and TORCH_SPEC: see venv.sh.
set -euo pipefail
# shellcheck source=scripts/venv.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/venv.sh"

ensure_venv test

cores=$(nproc)
jobs=${MORI_MP_TEST_JOBS:-$((cores < 4 ? cores : 4))}
cd -- "$ROOT"
# loadgroup: tests that share a costly fixture (xdist_group) run in one process.
exec "$VENV/bin/python" -m pytest -n "$jobs" --dist loadgroup "$@"
