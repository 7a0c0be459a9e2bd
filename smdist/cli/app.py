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
    """Say which version this is, and whether its compiled kernel is in use."""
    from smdist import kernel

    typer.echo(f"smdist {smdist.__version__}")
    typer.echo(f"kernel: {'compiled' if kernel.compiled else 'numpy, which is slower'}")


@app.command()
def recover(
    spools: Annotated[
        Optional[list[Path]],  # noqa: UP045 - read at run time, also by Python 3.10
        typer.Argument(
            metavar="[SPOOL]...", help="Folders to send; by default all that are found."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="The training process is surely gone; do not check. If the run that is there is "
            "another job's, store it as one more attempt of that.",
        ),
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


@app.command()
def merge(
    path: Annotated[str, typer.Argument(help="Where the run is: a directory or a URL.")],
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Also if a coordinator seems to be at work.")
    ] = False,
) -> None:
    """Write down the merged view of a run once, so that it opens with a handful of requests.

    A finished run has one already, unless a rank was left without its uploader.
    """
    from smdist.cli.merge import run

    raise typer.Exit(run(path, take_over=take_over))


coordinator = typer.Typer(
    help="The Ray actor that merges runs while they are written. Runs can be read without it.",
    no_args_is_help=True,
)
app.add_typer(coordinator, name="coordinator")

_Address = Annotated[
    str,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="Which Ray: local (one of your own on this machine), auto (the cluster this machine "
        "belongs to), host:port, or ray://host:10001.",
    ),
]


@coordinator.command()
def start(
    watch: Annotated[str, typer.Option(help="A run, or a place below which runs are or will be.")],
    address: _Address = "local",
    interval_s: Annotated[
        float, typer.Option("--interval", help="How often to look at the store, in seconds.")
    ] = 1.0,
    lost_after_s: Annotated[
        float,
        typer.Option("--lost-after", help="A rank without a sign of life so long is lost (s)."),
    ] = 60.0,
    lagging_after_s: Annotated[
        float, typer.Option("--lagging-after", help="A rank so far behind is lagging (s).")
    ] = 30.0,
    shards: Annotated[
        int, typer.Option(help="Processes that read the ranks; more for thousands of them.")
    ] = 1,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Make another coordinator of these runs stop.")
    ] = False,
    wheel: Annotated[
        Optional[Path],  # noqa: UP045 - read at run time, also by Python 3.10
        typer.Option(help="What to run on a cluster; by default what runs here, if it differs."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Stay and tell what changes.")] = False,
) -> None:
    """Start the coordinator of a place, or find that it runs."""
    from smdist.cli.coordinator import start as run
    from smdist.coordination.ray_actor.coordinator import Settings
    from smdist.errors import ConfigurationError

    try:
        settings = Settings(
            watch, interval_s, lost_after_s, lagging_after_s, take_over, shards=shards
        )
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(run(address, settings, wheel, follow))


@coordinator.command()
def status(
    address: _Address = "local",
    watch: Annotated[str, typer.Option(help="Only the coordinator of this place.")] = "",
    run: Annotated[str, typer.Option(help="Only this run: its URL, id, or name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Ranks and steps as the coordinators on a Ray see them."""
    from smdist.cli.coordinator import status as show

    raise typer.Exit(show(address, watch, run, as_json))


@coordinator.command()
def stop(
    address: _Address = "local",
    watch: Annotated[str, typer.Option(help="Only the coordinator of this place.")] = "",
) -> None:
    """End coordinators kindly; a local Ray with none left is stopped too."""
    from smdist.cli.coordinator import stop as end

    raise typer.Exit(end(address, watch))


def main() -> None:
    app()
