# shellcheck shell=bash
# One virtual environment for this checkout, made once. Sourced by quickstart.sh, test.sh and .ci/run:
#
#     . scripts/venv.sh
#     ensure_venv cli            # or test, or dev; each includes the one before
#     "$VENV/bin/python" ...
#
# PYTHON       interpreter to make .venv with (default python3; 3.10 or newer)
# TORCH_SPEC   what pip is given to install torch, where .venv has none (default torch==2.13.0)
#
# Which build of torch pip takes is pip's own business. On Linux x86-64 PyPI's is a CUDA build of several GB,
# which nothing here needs. A CPU build comes from wherever pip is told to look first: PIP_FIND_LINKS with a
# folder of wheels, or TORCH_SPEC="torch --index-url URL" with an index of CPU wheels. A version is named
# because a CPU wheel in such a folder loses against a newer release on PyPI. A torch that .venv has already
# (a ROCm build, say) is left alone.

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv

say() { printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2; }
die() {
    say "$@"
    exit 1
}

# ensure_venv EXTRA: make .venv and install this checkout into it, editable, unless that has been done.
ensure_venv() {
    local extra=$1 name state
    local -a torch
    _make_venv
    # What an installation depends on; .venv/.installed-EXTRA remembers it.
    state="$ROOT $(_version "$VENV/bin/python") $(cksum <"$ROOT/pyproject.toml")"
    if [[ -f $VENV/.installed-$extra && $(<"$VENV/.installed-$extra") == "$state" ]]; then
        return
    fi
    say "installing into $VENV (extra: $extra)"
    if ! "$VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
        read -r -a torch <<<"${TORCH_SPEC:-torch==2.13.0}"
        _pip "${torch[@]}"
    fi
    _pip --editable "${ROOT}[$extra]"
    for name in cli test dev; do
        printf '%s\n' "$state" >"$VENV/.installed-$name"
        [[ $name != "$extra" ]] || break
    done
}

_make_venv() {
    local python=${PYTHON:-python3}
    if [[ -e $VENV ]]; then
        "$VENV/bin/python" -c '' || die "$VENV is broken, see above: remove it and run this again"
        [[ -z ${PYTHON:-} || $(_version "$PYTHON") == "$(_version "$VENV/bin/python")" ]] ||
            die "$VENV was not made with PYTHON=$PYTHON: remove it and run this again, or leave PYTHON out"
        "$VENV/bin/python" -c 'import pip' 2>/dev/null || "$VENV/bin/python" -m ensurepip
        return
    fi
    command -v -- "$python" >/dev/null ||
        die "there is no $python; on Debian: apt-get install python3 python3-venv (or set PYTHON=/path/to/python)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$("$python" --version 2>&1) is too old: 3.10 or newer is needed; set PYTHON=/path/to/python"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments; on Debian: apt-get install python3-venv" \
            "(for a Python that is not Debian's default, the package of its version, such as python3.12-venv)"
    say "making $VENV with $("$python" --version 2>&1)"
    "$python" -m venv "$VENV"
}

_version() { "$1" -c 'import sys; print(sys.version)'; }

_pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }
