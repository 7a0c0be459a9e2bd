"""The processes of schedules: a rank without a framework, its uploader, and `smdist recover`.

Run as a program it imports all they need once, makes an S3 client once, and then forks a process for
each order, like `job.py`. Uploaders are those of smdist, started here instead of by a supervisor:
an interpreter of their own would cost a second each.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import mmap
import os
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from smdist import kernel
from smdist.errors import StoreError
from smdist.format.block import crc32c
from smdist.format.journal_records import Part, Record
from smdist.format.manifest import Run, Session
from smdist.identity import ModeKeys, StepRef
from smdist.planning import TensorPlan
from smdist.processes import start_ticks
from smdist.storage import open_store
from smdist.storage.s3 import store as s3
from smdist.workers.capture import capture as capturing
from smdist.workers.capture.capture import Capture, CaptureLimits
from smdist.workers.capture.part_plan import CaptureRequest, PartPlan, plan_part
from smdist.workers.capture.tensor_access import NumpyAccess
from smdist.workers.join.launcher_identity import machine
from smdist.workers.spool.journal import JournalWriter
from smdist.workers.spool.spool import Spool, SpoolInfo
from smdist.workers.upload import entry_point, retry
from smdist.workers.upload.process import EXIT_DATA_PENDING
from smdist.workers.upload.recover import recover
from tests.faults.job import Order, _become, _serve
from tests.faults.schedule_plan import CLOSE, Plan, value

SESSION = "0123456789abcdef"

# -- the rank --------------------------------------------------------------------------------------


class Evidence:
    """What the rank knows to be safe, in the lines that `launcher.Started` reads."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def captured(self, plan: Plan, step: int, kind: int) -> None:
        lines = ""
        for i in range(len(plan.kinds[kind])):
            data = value(plan, step, kind, i).tobytes()
            lines += f"{step} {crc32c(data)} {plan.name(kind, i)}\n"
        os.write(self._fd, lines.encode())

    def mark(self, text: str) -> None:
        os.write(self._fd, f"# {text}\n".encode())


class MortalJournal(JournalWriter):
    """Dies where the plan says: before a record, in the middle of writing it, or right after."""

    def __init__(self, spool: Spool, plan: Plan) -> None:
        self._plan, self._torn, self._step = plan, False, (0, 0, 0)
        super().__init__(spool, file_bytes=plan.journal_bytes)

    @property
    def _due(self) -> bool:
        return self.next_ordinal == self._plan.dies_at

    def append(self, record: Record) -> int:
        due = self._due
        if due and self._plan.dies == "before":
            _die()
        self._torn = due and self._plan.dies == "torn"
        ordinal = super().append(record)
        if due:
            _die()
        return ordinal

    def append_part(
        self, target: int, source: int, nbytes: int, kind: int, arena: int, offset: int
    ) -> None:
        if self._due:
            guard = kernel.copy((target,), (source,), (nbytes,), target)
            self.append(Part(*self._step, time.time(), kind, arena, offset, guard))
        super().append_part(target, source, nbytes, kind, arena, offset)

    def set_step(self, mode: int, mode_step: int, step: int) -> None:
        self._step = (mode, mode_step, step)
        super().set_step(mode, mode_step, step)

    def _write(self, file: mmap.mmap, at: int, data: bytes) -> None:
        if self._torn:
            super()._write(file, at, data[: len(data) // 2])
            _die()
        super()._write(file, at, data)


def _die() -> NoReturn:
    while True:
        os.kill(os.getpid(), signal.SIGKILL)


def rank(order: Order) -> NoReturn:
    plan = msgspec.convert(order.arguments["plan"], Plan)
    folder = Path(order.folder)
    info = SpoolInfo(
        run=Run("run", 0.0, "none"),
        session=Session(SESSION, 0, 1, 0, "all", 0.0, machine(), os.getpid(), ""),
        out_dir=order.arguments["out_dir"],
        upload=plan.upload,
        trainer_pid=os.getpid(),
        trainer_start=start_ticks(os.getpid()),
        overflow="",
    )
    spool = Spool.create(info, folder)
    vars(capturing)["JournalWriter"] = functools.partial(MortalJournal, plan=plan)
    evidence = Evidence(folder / "evidence")
    evidence.mark(f"spool {spool.path}")
    limits = CaptureLimits(plan.buffer_bytes)
    capture = Capture(spool, NumpyAccess(), limits, lambda text: evidence.mark(f"said {text}"))
    _save(plan, capture, evidence, folder)
    if plan.ends != "exit":
        evidence.mark("ending")
        capture.end("ValueError: planned" if plan.ends == "error" else "")
        evidence.mark("ended")
    if plan.ends == "drain":
        _drain(capture, folder)
        capture.close()
    os._exit(0)


def _save(plan: Plan, capture: Capture[Any], evidence: Evidence, folder: Path) -> None:
    parts = [_part(plan, kind) for kind in range(len(plan.kinds))]
    capture.describe("collections/worker_0.json", b'{"worker":"worker_0","collections":[]}')
    captures = 0
    for number, step in enumerate(plan.steps):
        evidence.mark(f"closing {number - 1}")
        capture.begin(StepRef(ModeKeys.TRAIN, number, number))
        evidence.mark(f"closed {number - 1}")
        for kind in step:
            if kind == CLOSE:
                evidence.mark(f"closing {number}")
                capture.close_step()
                evidence.mark(f"closed {number}")
                continue
            tensors = [value(plan, number, kind, i) for i in range(len(plan.kinds[kind]))]
            if capture.save(parts[kind], tensors):
                evidence.captured(plan, number, kind)
            else:
                evidence.mark(f"dropped {kind} of {number}")
            captures += 1
            if captures in plan.waits:
                _drain(capture, folder)
    if plan.ends not in ("exit", "error"):
        evidence.mark(f"closing {len(plan.steps) - 1}")


def _part(plan: Plan, kind: int) -> PartPlan:
    wanted = []
    for i, saved in enumerate(plan.kinds[kind]):
        reductions = frozenset(("min", "max", "mean") if saved.reduced else ())
        like = value(plan, 0, kind, i)
        wish = TensorPlan(raw=saved.raw, reductions=reductions, collections=("default",))
        wanted.append(CaptureRequest(plan.name(kind, i), "F32", like.shape, like.nbytes, wish))
    return plan_part(wanted)


def _drain(capture: Capture[Any], folder: Path) -> None:
    """Like `close()` of a hook, it waits only as long as an uploader is there or will be."""
    deadline = time.monotonic() + 120  # not for ever, should the driver be gone
    while not capture.drain(0.05) and not (folder / "unattended").exists():
        if time.monotonic() > deadline:
            os._exit(1)


# -- its uploaders ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SmallParts(s3.S3Options):
    """Parts below 5 MiB, which AWS does not take, and test servers do."""

    def __post_init__(self) -> None:
        pass


def _adjust(plan: Plan) -> None:
    """In this process, stores are opened as the plan says, and nobody waits long to try again."""

    def options(deadline_s: float = 10.0) -> SmallParts:
        return SmallParts(
            multipart_bytes=plan.multipart_bytes,
            part_bytes=plan.part_bytes,
            deadline_s=min(deadline_s, plan.deadline_s),
            first_pause_s=0.005,
            most_pause_s=0.1,
        )

    vars(s3)["S3Options"] = options
    vars(retry)["_MOST_PAUSE_S"] = 0.2


def uploader(order: Order) -> NoReturn:
    _adjust(msgspec.convert(order.arguments["plan"], Plan))
    entry_point.main(order.arguments["spool"])


def recovery(order: Order) -> NoReturn:
    _adjust(msgspec.convert(order.arguments["plan"], Plan))
    code = 1
    try:
        recover(Path(order.arguments["spool"]), lambda text: None)
        code = 0
    except retry.RetryDeadlineExceeded:
        code = EXIT_DATA_PENDING
    except BaseException:  # noqa: BLE001 - told, and judged by the driver
        traceback.print_exc()
    os._exit(code)


# -- the program -----------------------------------------------------------------------------------


def _warm() -> None:
    """All that is loaded late is loaded: by the first client, request, error and statistics."""
    os.environ.update(AWS_ACCESS_KEY_ID="warm", AWS_SECRET_ACCESS_KEY="warm")
    measured = TensorPlan(raw=True, reductions=frozenset({"mean"}), collections=())
    plan_part([CaptureRequest("x", "F32", (2,), 8, measured)])

    async def ask() -> None:
        store = open_store("s3://warm/x?endpoint_url=http://127.0.0.1:9", deadline_s=0.0)
        try:
            await store.put("x", (b"x",))
        except StoreError:
            pass
        finally:
            await store.close()

    asyncio.run(ask())
    time.strftime("%H:%M:%S")


def _main() -> None:
    _warm()
    gc.collect()
    gc.freeze()  # or every child copies all pages when it first collects
    os.write(1, b"0\n")
    order = _serve()
    exec(compile(order.script, "script", "exec"), {**globals(), **_become(order)})  # noqa: S102


if __name__ == "__main__":
    _main()
