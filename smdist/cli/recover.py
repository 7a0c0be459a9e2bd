"""`smdist recover`: what is left of dead processes, spool by spool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from smdist.errors import SmdistError
from smdist.workers.patience import readable_bytes
from smdist.workers.recover import (
    Recovered,
    TrainerAlive,
    default_roots,
    find_spools,
    pending_bytes,
    recover,
)
from smdist.workers.spool import Spool, SpoolBusy, private_root

__all__ = ["run"]


def run(spools: Sequence[Path], *, force: bool, give_up_s: float) -> int:
    """Exit code: 0 when nothing is left that could have been sent."""
    console = Console(highlight=False, soft_wrap=True)
    roots = default_roots()
    found = [one for path in spools for one in _below(path)] if spools else find_spools(roots)
    if not found:
        places = ", ".join(map(str, spools or roots))
        hint = "" if spools else "; name the folder if a hook was given another spool_dir"
        console.print(f"nothing to recover: no spools of this user in {places}{hint}", markup=False)
        return 0
    sent = [
        _one(console, path, bool(spools), force=force, give_up_s=give_up_s)
        or (path not in spools and not path.exists())  # its own uploader was quicker
        for path in found
    ]
    return 0 if all(sent) else 1


def _below(path: Path) -> list[Path]:
    """A spool itself, or all that hooks have put into a folder that they were given as spool_dir."""
    return find_spools([path]) if private_root(path).is_dir() else [path]


def _one(console: Console, path: Path, named: bool, *, force: bool, give_up_s: float) -> bool:
    """False when it should have been sent; one that is in use is a failure only if it was named."""
    try:
        done = _send(console, path, force=force, give_up_s=give_up_s)
    except (SpoolBusy, TrainerAlive) as error:
        console.print(f"left alone: {error}", markup=False)
        return not named
    except (SmdistError, OSError) as error:
        console.print(f"not sent: {path}: {error}", markup=False)
        return False
    console.print(_told(done), markup=False)
    return True


def _send(console: Console, path: Path, *, force: bool, give_up_s: float) -> Recovered:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(path.name, total=pending_bytes(Spool.open(path)))
        return recover(
            path,
            lambda message: console.print(message, markup=False),
            lambda _spool, batch: progress.advance(task, batch.news.nbytes),
            force=force,
            give_up_s=give_up_s,
        )


def _told(done: Recovered) -> str:
    steps = f"{done.steps} step{'' if done.steps == 1 else 's'}"
    what = f"{steps}, {readable_bytes(done.nbytes)}" if done.nbytes else "nothing was missing"
    how = f"{done.state}: {done.reason}" if done.reason else done.state
    return f"{done.worker} -> {done.out_dir}: {what} ({how})"
