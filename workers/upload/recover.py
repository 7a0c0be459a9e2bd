"""Send what dead processes left behind: the uploader's work, done by hand.

A spool outlives its job when the store stayed closed until the uploader gave up, or when uploader
and training process were killed together. `find_spools` looks where hooks put them; `recover` sends
one and removes it. Both believe only what is this user's own (workers/spool/private_files.py). It works on no
spool that somebody else still works on: a hook that is not closed, or an uploader. A process that
goes on after its hook was closed is not in the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from smdist.errors import TrainerAlive
from smdist.format.journal_records import End
from smdist.format.manifest import RankState
from smdist.identity import worker_name
from smdist.processes import is_alive
from smdist.workers.join.launcher_identity import machine
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalReader
from smdist.workers.spool.private_files import list_folders, private_root
from smdist.workers.spool.spool import Spool
from smdist.workers.upload.batch import Batch, captured_bytes
from smdist.workers.upload.uploader import Uploader

__all__ = ["Recovered", "default_roots", "find_spools", "pending_bytes", "recover"]


class Recovered(NamedTuple):
    """What `recover` did: what it sent, and how the rank ended."""

    worker: str
    out_dir: str
    state: RankState
    reason: str
    steps: int
    nbytes: int


def default_roots(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Every place a hook may choose for its spool."""
    names = (environ.get("SMDIST_SPOOL_DIR"), "/dev/shm", environ.get("TMPDIR"), "/var/tmp", "/tmp")
    found = (os.path.abspath(os.path.expanduser(name)) for name in names if name)
    return tuple(dict.fromkeys(map(Path, found)))


def find_spools(
    roots: Iterable[Path], refused: Callable[[str], None] = lambda _message: None
) -> list[Path]:
    """Spools of this user, in use or not, the oldest first: attempts of a run are numbered so.

    `refused` is told of each folder that bears the name of one and may be somebody else's work.
    """
    found = []
    for root in roots:
        for path in list_folders(private_root(root), refused):
            with contextlib.suppress(OSError):  # it is none, or it was sent and removed meanwhile
                found.append(((path / "spool.json").lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def pending_bytes(spool: Spool) -> int:
    """How many captured bytes are not in the store, by what the acknowledgement page says."""
    with contextlib.closing(AckPage(spool.path / "ack_page")) as ack_page:
        return captured_bytes(spool, ack_page.acked)


def recover(
    path: Path,
    say: Callable[[str], None],
    progress: Callable[[Spool, Batch], None] = lambda _spool, _batch: None,
    *,
    give_up_s: float = 60.0,
    force: bool = False,
) -> Recovered:
    """Send everything in the spool at `path`, say how its rank ended, and remove it.

    It goes where the training process found its place, and only if the run of that process is there.
    `force`: the training process is surely gone, though it ran where this cannot be seen, and the place
    is the right one, though the run is not there or has a later start of this rank in it. Raises
    SpoolBusy or TrainerAlive when it must not be touched, RetryDeadlineExceeded when the store refuses, RankRejected when
    it holds another run, NotPrivate when others could have written it, SpoolUnavailable when it is no
    spool.
    """
    spool = Spool.open(path)
    options = msgspec.structs.replace(spool.info.upload, drain_deadline_s=give_up_s)
    spool.info = msgspec.structs.replace(spool.info, upload=options)
    if force and spool.info.entry is not None:
        entry = msgspec.structs.replace(spool.info.entry, resume=True)
        spool.info = msgspec.structs.replace(spool.info, entry=entry)
    steps = nbytes = 0

    def note(batch: Batch) -> None:
        nonlocal steps, nbytes
        steps += sum(entry.closed for entry in batch.segment.entries)
        nbytes += batch.segment.nbytes
        progress(spool, batch)

    with spool.lock():  # first: an uploader that works knows best
        if not force:
            _check_trainer(spool)
        uploader = Uploader(spool, say, note, trusts=force)
        ending = asyncio.run(uploader.run(trainer_gone=True))
        spool.remove()
    worker, out_dir = worker_name(spool.info.session.rank), spool.info.out_dir
    return Recovered(worker, out_dir, ending.state, ending.reason, steps, nbytes)


def _check_trainer(spool: Spool) -> None:
    info = spool.info
    here, host = machine(), info.session.host
    if host not in ("", here):
        raise TrainerAlive(
            f"{spool.path} was filled by process {info.trainer_pid} on {host}, and this is {here}: "
            "run `smdist recover` there, or pass --force if that process is surely gone"
        )
    if is_alive(info.trainer_pid, info.trainer_start) and not _is_closed(spool):
        raise TrainerAlive(
            f"{spool.path} is still being filled by process {info.trainer_pid}; its own uploader sends "
            "it. Should that have given up: run this again once the hook is closed"
        )


def _is_closed(spool: Spool) -> bool:
    """Whether the hook has written its last word: nothing is added after that."""
    with contextlib.closing(JournalReader(spool)) as journal:
        while pieces := journal.read(10_000):
            if any(isinstance(piece.record, End) for piece in pieces):
                return True
    return False
