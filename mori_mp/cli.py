"""The `mori-mp` command.

typer and rich are the optional extra `cli`; they are imported when the command runs, so that the connector
never needs them. Each command lives in a module of its own, named in COMMANDS as `module:function`.
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "pipeline": "mori_mp.pipeline.command:pipeline",
    "top": "mori_mp.cli_top:top",
    "health": "mori_mp.cli_health:health",
    "bench": "mori_mp.cli_bench:bench",
    "doctor": "mori_mp.cli_doctor:doctor",
    "topology": "mori_mp.cli_pin:topology",
    "pin": "mori_mp.cli_pin:pin",
}
_EXTRA = ("typer", "rich")


def main() -> None:
    """Entry point of the `mori-mp` script."""
    missing = [name for name in _EXTRA if not _importable(name)]
    if missing:
        sys.exit(f"mori-mp: the command line needs {' and '.join(missing)}: pip install 'mori-mp[cli]'")
    build_app()()


def build_app() -> typer.Typer:
    """The command with all its subcommands."""
    import typer

    app = typer.Typer(
        name="mori-mp",
        help="Multi-process stage connector for vLLM-Omni: run it, look at it, measure it.",
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"mori-mp {metadata.version('mori-mp')}")
            raise typer.Exit

    asked = typer.Option(
        False, "--version", callback=show_version, is_eager=True, help="Print the version, and end."
    )

    @app.callback()
    def root(version: bool = asked) -> None:
        """Options of the command itself; having them keeps every command a subcommand."""

    for name, place in COMMANDS.items():
        module, _, function = place.partition(":")
        app.command(name)(getattr(import_module(module), function))
    return app


def _importable(name: str) -> bool:
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
