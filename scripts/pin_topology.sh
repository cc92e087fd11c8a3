#!/bin/sh
# Print a CPU pinning plan for a mori-mp connector (see --help). This file only finds a Python that has mori_mp
# and calls `python -m mori_mp.shared.pinning "$@"`.
#
# Tried in order: $MORI_MP_PYTHON (and nothing else when it is set), python3 beside this file (a virtual
# environment's bin), python3 and python on the PATH. From a source checkout any Python >= 3.10 will do: the planner
# needs nothing outside the standard library. Only --apply, which moves a running connector, needs mori-mp's own
# dependencies.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

has_module() {
    "$1" -c 'import mori_mp.shared.pin_cli' >/dev/null 2>&1
}

if [ -n "${MORI_MP_PYTHON:-}" ]; then
    if has_module "$MORI_MP_PYTHON"; then
        exec "$MORI_MP_PYTHON" -m mori_mp.shared.pinning "$@"
    fi
    echo "pin_topology.sh: MORI_MP_PYTHON=$MORI_MP_PYTHON cannot import mori_mp; install it there or unset it" >&2
    exit 1
fi

for python in "$here/python3" python3 python; do
    if has_module "$python"; then
        exec "$python" -m mori_mp.shared.pinning "$@"
    fi
done

root=$(dirname -- "$here")
if [ -f "$root/mori_mp/shared/pinning.py" ]; then
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    for python in python3 python; do
        if has_module "$python"; then
            exec "$python" -m mori_mp.shared.pinning "$@"
        fi
    done
fi

echo "pin_topology.sh: no Python with mori_mp found; install mori-mp or set MORI_MP_PYTHON" >&2
exit 1
