"""`smdist recover`: upload the spools that dead training processes left behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from smdist.cli.console import PlainConsole
from smdist.errors import SmdistError, SpoolBusy, TrainerAlive
from smdist.messages import count_of, printable, readable_bytes
from smdist.workers.spool.private_files import private_root
from smdist.workers.spool.spool import Spool, remove_leftover, remove_leftovers
from smdist.workers.upload.recover import (
    Recovered,
    default_roots,
    find_spools,
    pending_bytes,
    recover,
)

__all__ = ["run"]


def run(spools: Sequence[Path], *, force: bool, give_up_s: float) -> int:
    """Send the given spools, or all that are found; return the exit code.

    It is 0 if everything that could be sent was sent and nothing was refused.
    """
    console = PlainConsole()
    refused: list[str] = []
    paths = list(spools or default_roots())
    found = [one for path in paths for one in _spools_at(path, bool(spools), refused)]
    for message in refused:
        console.print(f"refused: {message}")
    if not found:
        where = ", ".join(map(str, paths))
        hint = "" if spools else ". Name the folder if the hook had another spool_dir."
        console.print(f"nothing to recover: no spools of this user in {where}{hint}")
        return 1 if refused else 0
    sent = [
        _send_one(console, path, bool(spools), force=force, give_up_s=give_up_s)
        or (path not in spools and not path.exists())  # its own uploader was faster
        for path in found
    ]
    return 0 if all(sent) and not refused else 1


def _spools_at(path: Path, named: bool, refused: list[str]) -> list[Path]:
    """Return `path` if it is a spool, else the spools below a hook's spool_dir.

    Spools without anything to send are removed.
    """
    place = Path(os.path.abspath(path))
    if named and not os.path.lexists(private_root(place)):
        return [] if remove_leftover(place) else [path]
    remove_leftovers(private_root(place))
    return find_spools([place], refused.append)


def _send_one(
    console: PlainConsole, path: Path, named: bool, *, force: bool, give_up_s: float
) -> bool:
    """Send a spool; return False if that failed. A spool in use is a failure only if it was named."""
    try:
        done = _send(console, path, force=force, give_up_s=give_up_s)
    except (SpoolBusy, TrainerAlive) as error:
        console.print(f"skipped: {error}")
        return not named
    except (SmdistError, OSError) as error:
        console.print(f"failed: {path}: {error}")
        return False
    console.print(_format_result(done))
    return True


def _send(console: PlainConsole, path: Path, *, force: bool, give_up_s: float) -> Recovered:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(
            escape(printable(path.name)), total=pending_bytes(Spool.open(path))
        )
        return recover(
            path,
            lambda message: console.print(message),
            lambda _spool, batch: progress.advance(task, batch.news.nbytes),
            force=force,
            give_up_s=give_up_s,
        )


def _format_result(done: Recovered) -> str:
    steps = count_of(done.steps, "step")
    what = f"{steps}, {readable_bytes(done.nbytes)}" if done.nbytes else "nothing was missing"
    how = f"{done.state}: {done.reason}" if done.reason else done.state
    return f"{done.worker} -> {done.out_dir}: {what} ({how})"
