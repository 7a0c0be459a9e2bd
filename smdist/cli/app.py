"""Commands and their options; each command's work is in the module of its name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

import smdist

__all__ = ["app", "main"]

app = typer.Typer(
    name="smdist",
    help="Tensors of every rank of a distributed training job, at one consistent step.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def version() -> None:
    """Say which version this is."""
    typer.echo(f"smdist {smdist.__version__}")


@app.command()
def recover(
    spools: Annotated[
        Optional[list[Path]],  # noqa: UP045 - read at run time, also by Python 3.10
        typer.Argument(
            metavar="[SPOOL]...", help="Folders to send; by default all that are found."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="The training process is surely gone; do not check.")
    ] = False,
    give_up_s: Annotated[
        float, typer.Option(help="How long to try while the store refuses, in seconds.")
    ] = 60.0,
) -> None:
    """Send what dead training processes left behind to the run it belongs to."""
    from smdist.cli.recover import run

    raise typer.Exit(run(spools or [], force=force, give_up_s=give_up_s))


@app.command()
def trial(
    path: Annotated[str, typer.Argument(help="Where the run is: a directory or a URL.")],
) -> None:
    """Say what a run holds: its ranks, its steps, and who is missing."""
    from smdist.cli.trial import run

    raise typer.Exit(run(path))


def main() -> None:
    app()
