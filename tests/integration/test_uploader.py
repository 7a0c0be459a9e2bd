"""The uploader as a process: real deaths, real file systems that refuse."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open

from smdist import kernel
from smdist.format.journal_records import Close, Declare, End, Flush, Inline, Part, TensorSpec
from smdist.format.manifest import Heartbeat, RankManifest
from smdist.processes import is_alive
from smdist.workers.spool.journal import JournalWriter
from smdist.workers.spool.spool import Spool, UploadOptions
from smdist.workers.upload.process import EXIT_DATA_PENDING, uploader_command
from tests.support.uploader_rig import (
    TRAIN,
    Job,
    Process,
    Rank,
    assert_exactly_once,
    make_spool,
    open_ack_page,
    rank_process,
    read_store,
)
from tests.support.waiting import until


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(root=str(tmp_path / "spools"), out_dir=str(tmp_path / "out"))


def start_uploader(spool: Spool, stderr: Path) -> subprocess.Popen[bytes]:
    with stderr.open("ab") as handle:
        return subprocess.Popen(uploader_command(spool, sys.executable), stderr=handle)


def start_dead_trainer() -> int:
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def wait_for_uploader(rank: Process, other_than: int) -> int:
    until(lambda: rank.uploader_pid() not in (0, other_than), "a new uploader")
    return rank.uploader_pid()


def wait_for_progress(rank: Process) -> None:
    with open_ack_page(rank.spool) as ack_page:
        assert ack_page is not None
        before = ack_page.acked
        until(lambda: ack_page.acked > before, "an uploader that gets on")


def kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), f"process {pid} to die")


def test_an_orderly_end_stores_everything_and_leaves_nothing(job: Job, tmp_path: Path) -> None:
    with rank_process(job, tmp_path) as rank:
        rank.rest()
        assert rank.popen.wait() == 0
        until(lambda: not rank.spool.exists(), "the spool to be removed")
        assert rank.stderr() == ""
    stored = read_store(tmp_path / "out", job.elements)
    assert_exactly_once(stored, rank)
    assert sorted(stored.closed) == list(range(job.steps))
    assert (stored.last.state, stored.last.reason) == ("ended", "")
    assert (tmp_path / "out/collections/worker_0.json").exists()
    assert list((tmp_path / "spools").iterdir()) == []
    assert not (tmp_path / "out/.tmp").exists()


def test_segments_open_with_safetensors(job: Job, tmp_path: Path) -> None:
    with rank_process(job, tmp_path) as rank:
        rank.rest()
        until(lambda: not rank.spool.exists(), "the spool to be removed")
    names: list[str] = []
    for path in sorted((tmp_path / "out/segments/worker_0").iterdir()):
        with safe_open(path, "numpy") as segment:
            names += [name for name in segment.keys() if "/." not in name]  # noqa: SIM118
    assert sorted(names) == sorted(
        f"train/{step}/{name}" for step in range(job.steps) for name in ("weight", "scalar/x")
    )


def anonymous_mib(pid: int) -> float:
    """Memory of a process that is no file's, as caches and shared pages are; 0 once it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def test_small_steps_by_the_thousand_take_little_memory(job: Job, tmp_path: Path) -> None:
    """All of them wait in the journal when the uploader starts; they would take 150 MiB at once."""
    count, steps = 500, 300
    names = [f"scalar/{i}" for i in range(count)]
    specs = tuple(TensorSpec(n, "F64", (), 8, 8 * i, -1, ()) for i, n in enumerate(names))
    job = msgspec.structs.replace(job, upload=UploadOptions(nice=0))
    spool = make_spool(job, pid=start_dead_trainer())
    data, kind = bytes(8 * count), Declare(0, (), specs, 8 * count)
    (spool.path / "arena-0").write_bytes(data)
    guard = kind.guard(kernel.address_of(bytearray(data)))
    journal = JournalWriter(spool)
    journal.append(kind)
    for step in range(steps):
        journal.append(Part(TRAIN, step, step, time.time(), 0, 0, 0, guard))
        journal.append(Close(TRAIN, step, step, time.time()))
    journal.close()
    uploader, most = start_uploader(spool, tmp_path / "stderr"), 0.0
    while uploader.poll() is None:
        most = max(most, anonymous_mib(uploader.pid))
        time.sleep(0.002)
    assert uploader.returncode == 0, (tmp_path / "stderr").read_text()
    assert 5 < most < 100
    manifests = sorted((tmp_path / "out/manifests/worker_0").iterdir())
    found = [msgspec.json.decode(path.read_bytes(), type=RankManifest) for path in manifests]
    assert [entry.step for each in found for entry in each.steps] == list(range(steps))


def test_killed_at_random_moments_nothing_is_lost_or_doubled(job: Job, tmp_path: Path) -> None:
    """The rank goes on all the while, into an arena that is reused as soon as it may be."""
    chance = random.Random(20)
    job = msgspec.structs.replace(job, steps=1_000_000, elements=5_000)
    with rank_process(job, tmp_path) as rank:
        killed = 0
        for turn in range(30):
            killed = wait_for_uploader(rank, other_than=killed)
            if turn % 5 == 4:  # too many in a row that get nowhere, and the supervisor gives up
                wait_for_progress(rank)
            time.sleep(chance.uniform(0.0, 0.1))  # the moment is what varies, nothing waits for it
            kill_and_wait(killed)
        # The rank itself at last, so that somebody has to finish.
        wait_for_uploader(rank, other_than=killed)
        rank.popen.kill()
        rank.rest()
        rank.popen.wait()
        until(lambda: not rank.spool.exists(), "the last uploader to finish")
    stored = read_store(tmp_path / "out", job.elements)
    assert_exactly_once(stored, rank)
    assert stored.last.state == "lost"
    assert len(stored.closed) >= 30


@pytest.mark.parametrize("seed", range(5))
def test_a_killed_rank_is_lost_with_all_it_captured(job: Job, tmp_path: Path, seed: int) -> None:
    job = msgspec.structs.replace(job, steps=1_000_000, elements=5_000)
    with rank_process(job, tmp_path) as rank:
        for _ in range(random.Random(seed).randrange(1, 200)):
            rank.next("raw")
        rank.popen.kill()
        rank.rest()
        rank.popen.wait()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
    stored = read_store(tmp_path / "out", job.elements)
    assert_exactly_once(stored, rank)
    assert stored.last.state == "lost"
    assert f"process {rank.popen.pid} on " in stored.last.reason


def test_the_step_it_died_in_is_stored_and_open(job: Job, tmp_path: Path) -> None:
    with rank_process(msgspec.structs.replace(job, ends="wait", steps=3), tmp_path) as rank:
        rank.next("open")
        rank.popen.kill()
        rank.popen.wait()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
    stored = read_store(tmp_path / "out", job.elements)
    assert sorted(stored.raw) == [0, 1, 2, 3]
    assert sorted(stored.closed) == [0, 1, 2]
    assert stored.last.reason.endswith("within step 3 of TRAIN")


def test_it_outlives_interrupts_and_the_terminal(job: Job, tmp_path: Path) -> None:
    with rank_process(msgspec.structs.replace(job, ends="wait"), tmp_path) as rank:
        rank.next("open")
        until(lambda: rank.uploader_pid(), "the uploader")
        pid = rank.uploader_pid()
        assert os.getsid(pid) == pid
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(pid, number)
        # SIGTERM made it hurry: also the open step, long before its time.
        until(lambda: job.steps in read_store(tmp_path / "out", job.elements).raw, "the open step")
        assert rank.uploader_pid() == pid
        rank.popen.kill()
        until(lambda: not rank.spool.exists(), "the uploader to finish")


def test_heartbeats_come_also_when_nothing_happens(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "out/heartbeats/worker_0/000000.json"

    def beat() -> Heartbeat:
        return msgspec.json.decode(path.read_bytes(), type=Heartbeat)

    with rank_process(msgspec.structs.replace(job, ends="wait"), tmp_path) as rank:
        rank.next("open")
        until(path.exists, "the first heartbeat")
        until(lambda: beat().step == job.steps, "the last step to be told")
        first = beat()
        until(lambda: beat().time > first.time, "the next heartbeat")
        assert (first.session, first.interval_s) == ("0123456789abcdef", 0.2)


# -- a store that refuses --------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_waited_for(job: Job, tmp_path: Path, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(900 << 10))
    job = msgspec.structs.replace(job, out_dir=str(small_disk / "out"), steps=6, slots=64)
    with rank_process(job, tmp_path) as rank:
        rank.next("ended")
        with open_ack_page(rank.spool) as ack_page:
            assert ack_page is not None
            words = ("No space", "fails since")
            until(
                lambda: all(word in ack_page.last_error for word in words), "the trouble to be told"
            )
        assert rank.spool.exists()
        ballast.unlink()
        rank.rest()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
        said = rank.stderr().splitlines()
    assert_exactly_once(read_store(small_disk / "out", job.elements), rank)
    assert len(said) == 2, said
    assert said[0].startswith("smdist: worker_0: writing to the store fails since ")
    assert "No space" in said[0]
    assert "free some space" in said[0]
    assert said[0].endswith(" KiB wait, nothing is lost")
    assert said[1] == "smdist: worker_0: the store works again"


def test_big_objects_fail_while_small_ones_pass(job: Job, tmp_path: Path) -> None:
    """A limit on file size, as on a disk that is nearly full: heartbeats still get through."""
    upload = msgspec.structs.replace(job.upload, linger_s=30.0)
    job = msgspec.structs.replace(job, ends="wait", steps=0, upload=upload)
    with rank_process(job, tmp_path) as rank:
        pid = wait_for_uploader(rank, other_than=0)
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        rank.next("open")
        os.kill(pid, signal.SIGTERM)  # only now does it write the open step
        with open_ack_page(rank.spool) as ack_page:
            assert ack_page is not None
            until(lambda: "File too large" in ack_page.last_error, "the trouble to be told")
            beat = tmp_path / "out/heartbeats/worker_0/000000.json"
            until(beat.exists, "a heartbeat")
            before = beat.read_bytes()
            until(lambda: beat.read_bytes() != before, "another heartbeat")
            until(lambda: "File too large" in ack_page.last_error, "the trouble to be told again")
            assert ack_page.acked == 0
            resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
            until(
                lambda: ack_page.acked > 0 and not ack_page.last_error, "the limit to be forgotten"
            )
        rank.popen.kill()
        rank.rest()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
        said = rank.stderr().splitlines()
    assert sorted(read_store(tmp_path / "out", job.elements).raw) == [0]
    assert len(said) == 2, said


def test_a_directory_that_cannot_be_made_is_waited_for(job: Job, tmp_path: Path) -> None:
    """A file is where the directory should be: refuses root, too."""
    (tmp_path / "out").write_text("in the way")
    with rank_process(job, tmp_path) as rank:
        with open_ack_page(rank.spool) as ack_page:
            assert ack_page is not None
            until(lambda: ack_page.last_error, "the trouble to be told")
        (tmp_path / "out").unlink()
        rank.rest()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
    assert_exactly_once(read_store(tmp_path / "out", job.elements), rank)


def test_it_gives_up_after_the_deadline_and_says_what_to_type(job: Job, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    job = msgspec.structs.replace(
        job, upload=msgspec.structs.replace(job.upload, drain_deadline_s=0.3)
    )
    spool = make_spool(job, pid=start_dead_trainer())
    rank = Rank(spool, job)
    rank.step(0)
    rank.close()
    process = start_uploader(spool, tmp_path / "stderr")
    assert process.wait(60) == EXIT_DATA_PENDING
    assert f"smdist recover {spool.path}" in (tmp_path / "stderr").read_text()
    assert (spool.path / "journal-000000").exists()


# -- what the journal may hold ---------------------------------------------------------------------


def test_rotation_removes_journal_files_that_are_stored(job: Job, tmp_path: Path) -> None:
    job = msgspec.structs.replace(job, journal_bytes=2048, steps=200, elements=50, ends="wait")
    with rank_process(job, tmp_path) as rank:
        rank.next("open")
        until(lambda: not (rank.spool / "journal-000000").exists(), "stored files to be removed")
        assert len(list(rank.spool.glob("journal-*"))) >= 1
        rank.popen.kill()
        rank.rest()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
    assert_exactly_once(read_store(tmp_path / "out", job.elements), rank)


def test_overflow_on_disk_is_read_and_removed(job: Job, tmp_path: Path) -> None:
    overflow = tmp_path / "disk"
    job = msgspec.structs.replace(job, overflow=str(overflow), arena=1)
    (tmp_path / "out").write_text("in the way")
    with rank_process(job, tmp_path) as rank:
        assert (
            overflow / f"smdist-{os.geteuid()}" / f"{rank.spool.name}-overflow" / "arena-1"
        ).exists()
        (tmp_path / "out").unlink()
        rank.rest()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
    assert_exactly_once(read_store(tmp_path / "out", job.elements), rank)
    assert list(overflow.iterdir()) == []


def test_a_torn_tail_is_no_record(job: Job, tmp_path: Path) -> None:
    spool = make_spool(job, pid=start_dead_trainer())
    rank = Rank(spool, job)
    rank.step(0)
    rank.raw(1)
    rank.close()
    path = spool.path / "journal-000000"
    data = bytearray(path.read_bytes())
    end = len(data.rstrip(b"\0"))
    data[end - 2] ^= 0xFF
    path.write_bytes(data)
    assert start_uploader(spool, tmp_path / "stderr").wait(60) == 0
    stored = read_store(tmp_path / "out", job.elements)
    assert (sorted(stored.raw), sorted(stored.closed)) == ([0], [0])
    assert (stored.last.state, stored.last.upto) == ("lost", 5)


@pytest.mark.parametrize("length", [0, 16, 0x7FFFFFFF, 0xFFFFFFFF])
def test_behind_a_damaged_length_everything_is_stored_and_the_loss_is_told(
    job: Job, tmp_path: Path, length: int
) -> None:
    spool = make_spool(job, pid=start_dead_trainer())
    rank = Rank(spool, job)
    rank.step(0)
    at = rank.journal.written_bytes
    rank.raw(1)
    rank.scalar(1)
    rank.append(Close(TRAIN, 1, 1, 0.0))
    rank.step(2)
    rank.append(End("", 0.0))
    upto = rank.journal.next_ordinal
    rank.close()
    with (spool.path / "journal-000000").open("rb+") as handle:
        handle.seek(at)
        handle.write(length.to_bytes(4, "little"))
    assert start_uploader(spool, tmp_path / "stderr").wait(60) == 0
    stored = read_store(tmp_path / "out", job.elements)
    assert (sorted(stored.raw), sorted(stored.scalars)) == ([0, 2], [0, 1, 2])
    assert sorted(stored.closed) == [0, 1, 2]
    assert (stored.last.state, stored.last.upto) == ("ended", upto)
    dropped = [drop for manifest in stored.manifests for drop in manifest.dropped]
    assert [(drop.step, drop.reason) for drop in dropped] == [(1, "journal record 5 is damaged")]


def test_records_that_make_no_sense_are_left_out_and_told(job: Job, tmp_path: Path) -> None:
    spool = make_spool(job, pid=start_dead_trainer())
    rank = Rank(spool, job)
    rank.step(0)
    beyond = rank.slot_bytes * job.slots
    rank.append(Part(TRAIN, 1, 1, 0.0, 0, 0, beyond, 0))  # behind the arena's end
    rank.append(Part(TRAIN, 1, 1, 0.0, 0, 7, 0, 0))  # no such arena
    rank.journal.append(Part(TRAIN, 1, 1, 0.0, 99, 0, 0, 0))  # never declared
    rank.append(Inline(99, 1, 1, 0.0, 1, b""))  # no such mode
    rank.scalar(1)
    rank.append(Close(TRAIN, 1, 1, 0.0))
    rank.append(End("", 0.0))
    rank.close()
    assert start_uploader(spool, tmp_path / "stderr").wait(60) == 0
    stored = read_store(tmp_path / "out", job.elements)
    assert (sorted(stored.raw), sorted(stored.scalars)) == ([0], [0, 1])
    assert sorted(stored.closed) == [0, 1]
    assert stored.last.state == "ended"
    dropped = [drop for manifest in stored.manifests for drop in manifest.dropped]
    assert [drop.names for drop in dropped][:2] == [("weight",), ("weight",)]
    assert [drop for drop in dropped if "undeclared" in drop.reason]


def test_flush_brings_the_open_step_at_once(job: Job, tmp_path: Path) -> None:
    """With two slots the rank cannot go on before its own open step is stored."""
    job = msgspec.structs.replace(
        job, slots=1, steps=5, upload=msgspec.structs.replace(job.upload, linger_s=30.0)
    )
    with rank_process(job, tmp_path) as rank:
        rank.rest()
        until(lambda: not rank.spool.exists(), "the uploader to finish")
    assert_exactly_once(read_store(tmp_path / "out", job.elements), rank)


# -- two of them, and how big they are -------------------------------------------------------------


def test_a_second_uploader_does_not_touch_the_spool(job: Job, tmp_path: Path) -> None:
    spool = make_spool(job)
    rank = Rank(spool, job)
    first = start_uploader(spool, tmp_path / "first")
    until(lambda: rank.ack_page.uploader_pid == first.pid, "the first uploader")
    second = start_uploader(spool, tmp_path / "second")
    assert second.wait(60) == 1
    assert "another uploader" in (tmp_path / "second").read_text()
    rank.step(0)
    rank.append(End("", 0.0))
    rank.doorbell.ring()
    assert first.wait(60) == 0
    rank.close()


def test_a_final_manifest_is_never_followed_by_another(job: Job, tmp_path: Path) -> None:
    """As if it was killed between its last manifest and the removal of the spool."""
    spool = make_spool(job, pid=start_dead_trainer())
    rank = Rank(spool, job)
    rank.step(0)
    rank.append(End("bye", 0.0))
    rank.close()
    saved = {path.name: path.read_bytes() for path in spool.path.iterdir() if path.is_file()}
    assert start_uploader(spool, tmp_path / "stderr").wait(60) == 0
    spool = make_spool(job, pid=spool.info.trainer_pid)
    for name, data in saved.items():
        (spool.path / name).write_bytes(data)
    with open_ack_page(spool.path) as ack_page:
        assert ack_page is not None
        assert start_uploader(spool, tmp_path / "stderr").wait(60) == 0
        stored = read_store(tmp_path / "out", job.elements)
        assert [(m.state, m.reason) for m in stored.manifests] == [("ended", "bye")]
        assert not spool.path.exists()
        # A rank that waits for its last record to be stored reads this.
        assert (ack_page.acked, ack_page.steps_stored) == (stored.last.upto, 1)
        assert ack_page.bytes_stored == 4 * job.elements + 16


def test_another_process_under_the_same_keys_is_not_overwritten(job: Job, tmp_path: Path) -> None:
    for session, code in (("a" * 16, 0), ("b" * 16, 1)):
        spool = make_spool(job, pid=start_dead_trainer(), session=session)
        rank = Rank(spool, job)
        rank.step(0)
        rank.append(End("", 0.0))
        rank.close()
        assert start_uploader(spool, tmp_path / "stderr").wait(60) == code
    assert "from another process" in (tmp_path / "stderr").read_text()
    manifests = (tmp_path / "out/manifests/worker_0").iterdir()
    owners = [msgspec.json.decode(path.read_bytes(), type=RankManifest) for path in manifests]
    assert [owner.session for owner in owners] == ["a" * 16]
    assert spool.path.exists()


def test_it_stays_small(job: Job, tmp_path: Path) -> None:
    """64 MiB go through it; it never holds them."""
    upload = UploadOptions(linger_s=0.05, segment_bytes=16 << 20, nice=0)
    job = msgspec.structs.replace(
        job, steps=16, elements=1 << 20, slots=16, upload=upload, ends="wait"
    )
    with rank_process(job, tmp_path) as rank:
        rank.next("open")
        with open_ack_page(rank.spool) as ack_page:
            assert ack_page is not None
            until(lambda: ack_page.steps_stored == job.steps, "all steps to be stored")
        status = Path(f"/proc/{rank.uploader_pid()}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in status)
        assert int(fields["VmRSS"].split()[0]) < 90 << 10
        assert int(fields["RssAnon"].split()[0]) < 60 << 10
        rank.popen.kill()
        until(lambda: not rank.spool.exists(), "the uploader to finish")


def test_flush_record_alone_is_no_manifest(job: Job, tmp_path: Path) -> None:
    spool = make_spool(job, pid=start_dead_trainer())
    rank = Rank(spool, job)
    rank.append(Flush())
    rank.close()
    assert start_uploader(spool, tmp_path / "stderr").wait(60) == 0
    assert len(read_store(tmp_path / "out", job.elements).manifests) == 1
