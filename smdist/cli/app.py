"""Commands and their options. The work of each command is in a module that is imported on use."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

import smdist

__all__ = ["app", "main"]

app = typer.Typer(
    name="smdist",
    help="Record and read tensors of every rank of a distributed training job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.command()
def version() -> None:
    """Print the version, and whether the compiled kernel is in use."""
    from smdist import kernel

    typer.echo(f"smdist {smdist.__version__}")
    typer.echo(f"kernel: {'compiled' if kernel.compiled else 'numpy (slower)'}")


@app.command()
def recover(
    spools: Annotated[
        Optional[list[Path]],  # noqa: UP045 - read at run time, also by Python 3.10
        typer.Argument(
            metavar="[SPOOL]...", help="Folders to upload. Default: all that are found."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Do not check that the training process has ended. If another job's run is at the "
            "destination, store the data there as one more attempt.",
        ),
    ] = False,
    give_up_s: Annotated[
        float, typer.Option(help="Seconds to retry while the store refuses.")
    ] = 60.0,
) -> None:
    """Upload what dead training processes left in their buffers."""
    from smdist.cli.recover import run

    raise typer.Exit(run(spools or [], force=force, give_up_s=give_up_s))


class OutputFormat(str, Enum):
    """How a command prints its answer."""

    TABLE = "table"
    JSON = "json"


_Run = Annotated[str, typer.Argument(help="The run: a directory or a URL.")]


@app.command()
def trial(path: _Run) -> None:
    """Describe a run: its ranks, its steps, and what is missing."""
    from smdist.cli.runs import describe

    raise typer.Exit(describe(path))


@app.command()
def sql(
    path: _Run,
    text: Annotated[str, typer.Argument(help="SQL over statistics, steps, ranks, scalars.")],
    output: Annotated[str, typer.Option("--output", "-o", help="table, json or csv.")] = "table",
) -> None:
    """Answer a question in SQL over the statistics of all ranks and steps."""
    from smdist.cli.runs import ask

    raise typer.Exit(ask(path, text, output))


@app.command()
def check(
    path: _Run,
    rules: Annotated[
        str, typer.Option(help="Names of rules, separated by commas. Default: all.")
    ] = "",
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Print a table, or JSON for programs.")
    ] = OutputFormat.TABLE,
) -> None:
    """Look for problems: exit code 0 if none was found, 1 if some were, 2 if reading failed.

    A rule that lacks data is listed with what it needs. It is not counted as fine.
    """
    from smdist.cli.check import run

    names = [name.strip() for name in rules.split(",") if name.strip()]
    raise typer.Exit(run(path, names or None, as_json=output is OutputFormat.JSON))


@app.command()
def merge(
    path: _Run,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Merge even if a coordinator seems to be active.")
    ] = False,
) -> None:
    """Merge a run once, so that it opens with a few requests.

    A finished run is merged already, unless the uploader of a rank was killed.
    """
    from smdist.cli.runs import merge as run

    raise typer.Exit(run(path, take_over=take_over))


coordinator = typer.Typer(
    help="Merge runs while they are written, in a Ray actor. Runs can be read without it.",
    no_args_is_help=True,
)
app.add_typer(coordinator, name="coordinator")

_Address = Annotated[
    str,
    typer.Option(
        envvar="RAY_ADDRESS",
        help="Which Ray: local (your own on this machine), auto (the cluster of this machine), "
        "host:port, or ray://host:10001.",
    ),
]


@coordinator.command()
def start(
    watch: Annotated[str, typer.Option(help="A run, or a directory or URL that holds runs.")],
    address: _Address = "local",
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between two reads of a rank.")
    ] = 1.0,
    lost_after_s: Annotated[
        float,
        typer.Option("--lost-after", help="Seconds of silence after which a rank is lost."),
    ] = 60.0,
    lagging_after_s: Annotated[
        float, typer.Option("--lagging-after", help="Seconds behind which a rank is lagging.")
    ] = 30.0,
    shards: Annotated[
        int, typer.Option(help="Processes that read ranks. Use more for thousands of ranks.")
    ] = 1,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace another coordinator of these runs.")
    ] = False,
    wheel: Annotated[
        Optional[Path],  # noqa: UP045 - read at run time, also by Python 3.10
        typer.Option(help="smdist wheel for the cluster. Default: the code that runs here."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Stay and print changes.")] = False,
) -> None:
    """Start the coordinator of a directory or URL, if it does not run yet."""
    from smdist.cli.coordinator import start as run
    from smdist.coordinator import Settings
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
    watch: Annotated[str, typer.Option(help="Only the coordinator of this URL.")] = "",
    run: Annotated[str, typer.Option(help="Only this run: its URL, id, or name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show ranks and steps as the coordinators of a Ray see them."""
    from smdist.cli.coordinator import status as show

    raise typer.Exit(show(address, watch, run, as_json))


@coordinator.command()
def stop(
    address: _Address = "local",
    watch: Annotated[str, typer.Option(help="Only the coordinator of this URL.")] = "",
) -> None:
    """Stop coordinators. A local Ray without coordinators is stopped too."""
    from smdist.cli.coordinator import stop as end

    raise typer.Exit(end(address, watch))


def main() -> None:
    app()
