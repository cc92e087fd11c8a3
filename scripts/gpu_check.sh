#!/usr/bin/env bash
# Check engines and whole connectors on this machine's GPUs: the contract suite, real bytes, kills, and figures.
#
#     scripts/gpu_check.sh --out DIR [--kind cuda|hip] [--wheels DIR] [--engines LIST] [--quick]
#
#   --out DIR       where the report goes: environment.txt, contract.log, stages.log, engines.log,
#                   engines.json, connectors.log, connectors.json
#   --kind          cuda or hip; the default is what the machine has
#   --wheels DIR    wheels to put before this interpreter's packages (a machine without a package index)
#   --engines LIST  comma list of cuda_ipc, xgmi (default: both)
#   --quick         small sizes and few rounds
#
# PYTHON names the interpreter (default python3): CPython 3.10 or 3.12 with amd-mori, msgspec, pyzmq, pytest,
# pytest-timeout, pytest-xdist, torch and the test requirements of pyproject.toml. On AMD GPUs xgmi is Mori over ROCm. On
# NVIDIA GPUs it is the same unmodified Mori over a HIP runtime that passes its calls on to CUDA, built here with gcc
# (CUDA_HOME, default /usr/local/cuda). Two GPUs are used where there are two. Takes eight minutes.
#
# Exit status: 0 all passed, 1 something failed, 2 usage, 3 no GPU.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
out='' kind='' wheels='' engines=cuda_ipc,xgmi
quick=()

usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
    exit 2
}

while (($#)); do
    case $1 in
        --out | --kind | --wheels | --engines)
            (($# > 1)) || usage
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        --quick)
            quick=(--quick)
            shift
            ;;
        *) usage ;;
    esac
done
[[ $out ]] || usage

if [[ ! $kind ]]; then
    if [[ -e /dev/kfd ]]; then
        kind=hip
    elif command -v nvidia-smi >/dev/null; then
        kind=cuda
    else
        printf 'no GPU: neither /dev/kfd nor nvidia-smi is here\n' >&2
        exit 3
    fi
fi

mkdir -p -- "$out"
out=$(cd -- "$out" && pwd)
build=$(mktemp -d)
trap 'rm -rf -- "$build"' EXIT

path=$root
if [[ $wheels ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$build/site" "$wheels"/*.whl
    path=$build/site:$path
fi
export PYTHONPATH=$path:$root/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

if [[ $("$python" -c 'import torch; print("hip" if torch.version.hip else "cuda" if torch.version.cuda else "cpu")') != "$kind" ]]; then
    printf 'the torch of %s is not a build for %s; install one that is\n' "$python" "$kind" >&2
    exit 2
fi

{
    date -u +%Y-%m-%dT%H:%M:%SZ
    uname -srm
    "$python" --version
    "$python" - <<'PY'
from importlib.metadata import PackageNotFoundError, version

for name in ("amd-mori", "msgspec", "pyzmq", "torch"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "not installed")
PY
    if [[ $kind == cuda ]]; then
        nvidia-smi --query-gpu=index,name,pci.bus_id,driver_version,memory.total --format=csv,noheader
        nvidia-smi topo -m || true
    else
        rocm-smi --showproductname --showdriverversion --showbus || true
        rocm-smi --showtopo || true
    fi
} 2>&1 | tee "$out/environment.txt"

status=0
names=${engines//,/-$kind or }-$kind
printf '\n== contract: shm or %s\n' "$names"
MORI_MP_TEST_GPU=$kind MORI_MP_TEST_MORI=require "$python" -m pytest -q -p no:benchmark -n 3 --dist loadgroup --durations=5 \
    -o cache_dir="$build/cache" "$root/tests/engines" --ignore-glob "$root/tests/engines/test_connectors*.py" \
    -k "$names or shm" 2>&1 | tee "$out/contract.log" || status=1

printf '\n== whole connectors\n'
MORI_MP_TEST_GPU=$kind MORI_MP_TEST_MORI=require "$python" -m pytest -q -p no:benchmark -n 8 --dist worksteal --durations=5 \
    -o cache_dir="$build/cache" "$root"/tests/engines/test_connectors*.py -k "$names" 2>&1 |
    tee "$out/stages.log" || status=1

printf '\n== bytes, kills, figures\n'
"$python" "$root/tests/gpu_check.py" --kind "$kind" --engines "$engines" --build "$build" --out "$out" \
    "${quick[@]}" 2>&1 | tee "$out/engines.log" || status=1

printf '\n== whole connectors: put() to usable, figures\n'
"$python" "$root/tests/gpu_check_connectors.py" --kind "$kind" --engines "$engines" --build "$build" --out "$out" \
    "${quick[@]}" 2>&1 | tee "$out/connectors.log" || status=1

exit "$status"
