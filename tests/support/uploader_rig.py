"""A rank without a framework, as a process of its own, and what a test asks of it and of the store.

Run as a program, this module is the rank: it makes a spool, starts an uploader through the
supervisor, and writes steps whose content follows from their number. For each record that is safe
it prints a line, so a test knows what must arrive however the process ends. Arena slots are used
again as soon as the acknowledgement page says so: an uploader that reads too late stores wrong bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from smdist import kernel
from smdist.format.block import ObjectLocation, checksum_seed, read_tensor, tensor_ranges
from smdist.format.journal_records import (
    Close,
    Declare,
    Describe,
    End,
    Flush,
    Inline,
    Part,
    Record,
    TensorSpec,
)
from smdist.format.layout import Layout
from smdist.format.manifest import (
    Collections,
    RankManifest,
    Run,
    Session,
    StepEntry,
    collections_key,
    layout_key,
)
from smdist.format.stored_json import encode
from smdist.processes import start_ticks
from smdist.workers.join.launcher_identity import machine
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalFileFull, JournalWriter
from smdist.workers.spool.spool import Doorbell, Spool, SpoolInfo, UploadOptions
from smdist.workers.upload.process import Supervisor
from tests.support.spans import assert_spans_agree
from tests.support.waiting import until

TRAIN = 1
REPOSITORY = Path(__file__).parents[2]


class Job(msgspec.Struct, frozen=True):
    """What the rank does. `ends`: "end" (closes its hook), "wait" (lives on, open step), "exit"."""

    root: str
    out_dir: str
    overflow: str = ""
    steps: int = 20
    elements: int = 20_000
    slots: int = 8
    ends: str = "end"
    supervised: bool = True
    journal_bytes: int = 64 << 10
    arena: int = 0
    upload: UploadOptions = UploadOptions(
        linger_s=0.02, segment_bytes=256 << 10, heartbeat_s=0.2, drain_deadline_s=60.0, nice=0
    )


def make_spool(
    job: Job, pid: int = 0, session: str = "0123456789abcdef", rank: int = 0, world: int = 1
) -> Spool:
    pid = pid or os.getpid()
    info = SpoolInfo(
        run=Run("run", 0.0, "none"),
        session=Session(session, rank, world, 0, "all", 0.0, machine(), pid, ""),
        out_dir=job.out_dir,
        upload=job.upload,
        trainer_pid=pid,
        trainer_start=start_ticks(pid),
    )
    return Spool.create(info, Path(job.root), Path(job.overflow) if job.overflow else None)


# -- content ---------------------------------------------------------------------------------------


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def raw_value(step: int, elements: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(step, step + elements, dtype=np.float32)


def scalar_value(step: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([step * 1.5, -step], dtype=np.float64)


class Rank:
    """The training side: a journal, one arena cut into slots, no framework."""

    def __init__(self, spool: Spool, job: Job) -> None:
        self.spool, self.job = spool, job
        self.journal = JournalWriter(spool, file_bytes=job.journal_bytes)
        self.ack_page = AckPage(spool.path / "ack_page")
        self.doorbell = Doorbell(spool)
        self.slot_bytes = 4 * job.elements
        where = spool.path if job.arena == 0 else spool.make_overflow()
        path = where / f"arena-{job.arena}"
        path.touch(0o600)
        with path.open("wb+") as handle:
            os.posix_fallocate(handle.fileno(), 0, self.slot_bytes * job.slots)
            self.arena = mmap.mmap(handle.fileno(), self.slot_bytes * job.slots)
        self.busy: dict[int, int] = {}
        self.kinds: set[int] = set()

    def declarations(self) -> tuple[Declare, Declare]:
        n = self.job.elements
        raw = TensorSpec("weight", "F32", (n,), 4 * n, 0, -1, ("weights",))
        scalar = TensorSpec("scalar/x", "F64", (2,), 16, 0, -1, ("default",))
        return Declare(0, (), (raw,), 4 * n), Declare(1, (), (scalar,), 16)

    def append(self, record: Record) -> int:
        kind = record.kind if isinstance(record, (Part, Inline)) else None
        try:
            if kind is not None and kind not in self.kinds:
                self.journal.append(self.declarations()[kind])
                self.kinds.add(kind)
            return self.journal.append(record)
        except JournalFileFull:
            self.kinds.clear()
            self.journal.make_room((*self.declarations(), record))
            return self.append(record)

    def slot(self) -> int:
        """A free one; waits for the uploader like a full buffer does."""
        asked = False
        while True:
            for index in range(self.job.slots):
                if self.busy.get(index, -1) < self.ack_page.acked:
                    return index
            if not asked:
                self.append(Flush())
                asked = True
            self.doorbell.ring()
            time.sleep(0.001)

    def raw(self, step: int) -> None:
        slot = self.slot()
        start = slot * self.slot_bytes
        data = raw_value(step, self.job.elements).tobytes()
        self.arena[start : start + self.slot_bytes] = data
        guard = self.declarations()[0].guard(kernel.address_of(data))
        self.busy[slot] = self.append(
            Part(TRAIN, step, step, time.time(), 0, self.job.arena, start, guard)
        )

    def scalar(self, step: int) -> None:
        self.append(Inline(TRAIN, step, step, time.time(), 1, scalar_value(step).tobytes()))

    def step(self, step: int) -> None:
        self.raw(step)
        self.scalar(step)
        self.append(Close(TRAIN, step, step, time.time()))
        self.doorbell.ring()

    def close(self) -> None:
        self.journal.close()
        self.ack_page.close()
        self.doorbell.close()
        self.arena.close()


def leave_behind(
    job: Job, steps: int = 3, *, ended: bool = False, session: str = "0123456789abcdef"
) -> Spool:
    """A spool of a process that is dead, and of which nothing was sent."""
    spool = make_spool(job, dead_pid(), session)
    rank = Rank(spool, job)
    for step in range(steps):
        rank.step(step)
    if ended:
        rank.append(End("", 0.0))
    rank.close()
    return spool


def _main(job: Job) -> None:
    def tell(**what: object) -> None:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    spool = make_spool(job)
    rank = Rank(spool, job)
    supervisor = Supervisor(spool, trouble=lambda text: tell(trouble=text))
    if job.supervised:
        supervisor.start()
    tell(spool=str(spool.path), uploader=supervisor.pid)
    key = collections_key("worker_0")
    rank.append(Describe(key, encode(Collections("worker_0", ()), key)))
    for step in range(job.steps):
        rank.raw(step)
        tell(raw=step)
        rank.scalar(step)
        tell(scalar=step)
        rank.append(Close(TRAIN, step, step, time.time()))
        rank.doorbell.ring()
        tell(closed=step)
    if job.ends == "end":
        rank.append(End("", time.time()))
        rank.doorbell.ring()
        tell(ended=True)
        supervisor.join(60.0)
    elif job.ends == "wait":
        rank.raw(job.steps)
        rank.doorbell.ring()
        tell(open=job.steps)
        sys.stdin.read()
    rank.close()


# -- what a test uses ------------------------------------------------------------------------------


class Process:
    """The rank as the test sees it. A thread listens to it, so that it never waits for the test."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.stderr_path = folder / f"stderr-{time.monotonic_ns()}"
        self.said: list[dict[str, Any]] = []
        with self.stderr_path.open("wb") as stderr:
            self.popen = subprocess.Popen(
                [sys.executable, __file__, msgspec.json.encode(job).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            )
        self._read = 0
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        self.spool = Path(self.next("spool")["spool"])

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.endswith(b"\n"):  # what was torn by a kill is no word
                self.said.append(json.loads(line))

    def next(self, key: str) -> dict[str, Any]:
        """The next thing it says that has `key`."""
        found: list[dict[str, Any]] = []

        def heard() -> bool:
            over = not self._listener.is_alive()
            while self._read < len(self.said) and not found:
                said = self.said[self._read]
                self._read += 1
                if key in said:
                    found.append(said)
            assert found or not over, f"it ended without saying {key!r}: {self.stderr()}"
            return bool(found)

        until(heard, f"the rank to say {key!r}")
        return found[0]

    def rest(self) -> None:
        """Wait until it has ended, however, and everything it said was heard."""
        self._listener.join(60)
        assert not self._listener.is_alive()

    def told(self, key: str) -> list[int]:
        return [said[key] for said in self.said if key in said]

    def stderr(self) -> str:
        return self.stderr_path.read_text()

    def uploader_pid(self) -> int:
        with open_ack_page(self.spool) as ack_page:
            return ack_page.uploader_pid if ack_page is not None else 0

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._listener.join()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def rank_process(job: Job, folder: Path) -> Iterator[Process]:
    process = Process(job, folder)
    try:
        yield process
    finally:
        process.close()


@contextmanager
def open_ack_page(spool: Path) -> Iterator[AckPage | None]:
    if not (spool / "ack_page").exists():
        yield None
        return
    ack_page = AckPage(spool / "ack_page")
    try:
        yield ack_page
    finally:
        ack_page.close()


class Stored(NamedTuple):
    """What the store holds, checked on the way: whole, in order, each record once."""

    manifests: list[RankManifest]
    raw: dict[int, list[int]]  # step -> blocks
    scalars: dict[int, list[int]]
    closed: dict[int, int]  # step -> how often

    @property
    def last(self) -> RankManifest:
        return self.manifests[-1]


def read_store(out_dir: Path, elements: int) -> Stored:
    manifests = [
        msgspec.json.decode(path.read_bytes(), type=RankManifest)
        for path in sorted((out_dir / "manifests/worker_0").glob("*.json"))
    ]
    stored = Stored(manifests, {}, {}, {})
    upto = 0
    for seq, manifest in enumerate(manifests):
        assert (manifest.seq, manifest.first) == (seq, upto), "a gap or an overlap"
        assert manifest.state == "active" or seq == len(manifests) - 1, "said its end twice"
        upto = manifest.upto
        for entry in manifest.steps:
            assert manifest.first <= entry.block < manifest.upto
            _read_entry(out_dir, manifest.session, entry, stored, elements)
    named = {entry.segment for manifest in manifests for entry in manifest.steps} - {""}
    found = {str(path.relative_to(out_dir)) for path in out_dir.glob("segments/*/*")}
    assert named <= found, "a manifest without its segment"
    if manifests and manifests[-1].state != "active":
        assert found == named, "a segment that no manifest names"
    assert_spans_agree(out_dir)
    return stored


def _read_entry(
    out_dir: Path, session: str, entry: StepEntry, stored: Stored, elements: int
) -> None:
    step = entry.step
    if entry.closed:
        stored.closed[step] = stored.closed.get(step, 0) + 1
    if not entry.segment:
        return
    key = layout_key(entry.layout)
    layout = Layout.from_json((out_dir / key).read_bytes(), entry.layout, key)
    data = (out_dir / entry.segment).read_bytes()
    for tensor in layout.tensors:
        spans = tensor_ranges(layout, tensor)
        assert spans is not None
        parts = [data[s.start : s.stop] for s in (x.shifted(entry.offset) for x in spans)]
        value = read_tensor(
            tensor,
            parts[0],
            parts[1],
            ObjectLocation(str(out_dir), entry.segment),
            checksum_seed(session, entry),
        )
        is_raw = tensor.name == "weight"
        expected = raw_value(step, elements) if is_raw else scalar_value(step)
        np.testing.assert_array_equal(value, expected, err_msg=f"step {step}, {tensor.name}")
        (stored.raw if is_raw else stored.scalars).setdefault(step, []).append(entry.block)


def assert_exactly_once(stored: Stored, process: Process) -> None:
    """Everything the rank was promised is there, once."""
    for told, found in (
        (process.told("raw"), stored.raw),
        (process.told("scalar"), stored.scalars),
    ):
        assert set(told) <= set(found), f"lost: {sorted(set(told) - set(found))}"
        assert all(len(blocks) == 1 for blocks in found.values()), "stored twice"
    closed = set(process.told("closed"))
    assert closed <= set(stored.closed), "a step that was closed is open"
    assert all(times == 1 for times in stored.closed.values())


if __name__ == "__main__":
    _main(msgspec.json.decode(sys.argv[1].encode(), type=Job))
