"""Whether an interpreter can be that of transfer workers: `mori_mp.beforehand` runs this as a script in it.

It imports what a worker imports, in the way that `mori_mp.workers.boot` does, and exits with a text where
that fails. What stands here must be read by interpreters that are too old for the rest.
"""

import sys

SUPPORTED = "CPython 3.10 to 3.13"
SOUND = "workers can run in Python "
"""What the last line of its output begins with where nothing is wrong; the version follows."""


def supported(implementation: str, version: "tuple[int, int]") -> bool:
    """Tell whether mori-mp runs on sys.implementation.name and sys.version_info[:2]."""
    return implementation == "cpython" and version >= (3, 10)


def main(root: str, engine: str) -> None:
    """Import everything; root: the folder of the mori_mp to use, engine: the one that workers will run."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not supported(sys.implementation.name, sys.version_info[:2]):
        sys.exit(f"it is {sys.implementation.name} {version}; name one that is {SUPPORTED}")
    sys.path[0] = root  # instead of this script's folder
    try:
        import mori_mp

        del sys.path[0], mori_mp  # its parts are found through it
        from mori_mp.shared.errors import EngineUnavailable
        from mori_mp.workers import transfer  # noqa: F401
        from mori_mp.workers.engines import mori_api
    except Exception as exc:  # broken native libraries raise anything
        sys.exit(f"{type(exc).__name__}: {exc}; install into it what a worker imports, for Python {version}")
    try:
        if engine in mori_api.BACKENDS:
            mori_api.load_api()
    except EngineUnavailable as exc:
        sys.exit(str(exc))
    print(SOUND + version)


if __name__ == "__main__":
    main(*sys.argv[1:])
