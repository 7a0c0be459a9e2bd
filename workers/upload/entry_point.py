"""The uploader process: lock, signals, output and exit code around `Uploader.run`.

Started by `process.py` in the training process. Exit codes: 0 (everything is stored and the spool is
gone), EXIT_DATA_PENDING (the store stayed unreachable; the spool is kept), EXIT_RANK_REJECTED (this rank has
no part in the run that is there; the acknowledgement page says why). After any other code, the training
process starts another uploader.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import signal
import stat
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from smdist.errors import SmdistError
from smdist.identity import worker_name
from smdist.messages import printable
from smdist.processes import is_alive
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.private_files import open_file
from smdist.workers.spool.spool import Spool
from smdist.workers.upload.process import EXIT_DATA_PENDING, EXIT_RANK_REJECTED
from smdist.workers.upload.retry import RetryDeadlineExceeded
from smdist.workers.upload.run_guard import RankRejected
from smdist.workers.upload.uploader import Uploader

__all__ = ["main"]


def main(path: str) -> NoReturn:
    """Upload the spool at `path` and exit. A thread that hangs in a dead file system does not prevent it."""
    code = 1
    try:
        code = _upload(Spool.open(Path(path)))
    except SmdistError as error:
        _print_status("uploader", str(error))
    except BaseException:  # noqa: BLE001 - the supervisor starts another one; leave it a trace
        with contextlib.suppress(OSError):
            for line in traceback.format_exc().splitlines():
                sys.stderr.write(f"{printable(line)}\n")
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)


def _upload(spool: Spool) -> int:
    info = spool.info
    worker = worker_name(info.session.rank)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(info.upload.nice)
    with spool.lock():
        uploader = Uploader(
            spool,
            functools.partial(_print_status, worker),
            detach=functools.partial(_detach, spool.path / "uploader.log", worker),
        )
        loop = asyncio.new_event_loop()
        loop.add_signal_handler(signal.SIGTERM, uploader.request_shutdown)
        try:
            loop.run_until_complete(uploader.run())
        except RetryDeadlineExceeded as error:
            _print_status(worker, _kept_message(spool, str(error)))
            # Told to stop beside a living rank: its supervisor may start another one.
            again = uploader.shutdown_requests > 1 and is_alive(
                info.trainer_pid, info.trainer_start
            )
            return 1 if again else EXIT_DATA_PENDING
        except RankRejected as error:
            _write_last_error(spool, str(error))
            if not is_alive(info.trainer_pid, info.trainer_start):  # else its hook tells it
                _print_status(worker, _kept_message(spool, str(error)))
            return EXIT_RANK_REJECTED
    return 0


def _write_last_error(spool: Spool, message: str) -> None:
    ack_page = AckPage(spool.path / "ack_page")
    ack_page.last_error, ack_page.uploader_pid = message, 0
    ack_page.close()


def _kept_message(spool: Spool, trouble: str) -> str:
    return (
        f"gave up: {trouble}. What is not in {spool.info.out_dir} yet is kept; send it later with: "
        f"smdist recover {shlex.quote(str(spool.path))}"
    )


def _detach(log: Path, worker: str, message: str) -> None:
    """Say it, and let go of pipes that were the job's: `train.py 2>&1 | tee log` ends with the job.

    What is said from here on goes to `log`, as long as there is a spool.
    """
    inherited = [number for number in (1, 2) if _is_pipe(number)]
    if not inherited:
        return
    if message:
        _print_status(worker, message)
    try:
        handle = open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:
        handle = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for number in inherited:
        os.dup2(handle, number)
    os.close(handle)


def _is_pipe(number: int) -> bool:
    try:
        mode = os.fstat(number).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _print_status(worker: str, message: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever read it may be gone
        sys.stderr.write(f"smdist: {worker}: {printable(message)}\n")
        sys.stderr.flush()
