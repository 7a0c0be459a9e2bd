from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from smdist.errors import SpoolBusy, SpoolUnavailable
from smdist.format.manifest import Run, Session
from smdist.workers.spool.journal import JournalWriter
from smdist.workers.spool.private_files import private_root
from smdist.workers.spool.spool import (
    Doorbell,
    Spool,
    SpoolInfo,
    UploadOptions,
    remove_leftover,
    remove_leftovers,
    spool_name,
)


def make_info(rank: int = 3, session_id: str = "abcdefghijkl") -> SpoolInfo:
    session = Session(session_id, rank, 4, 2, "all", 0.0, "host", 77, "")
    return SpoolInfo(Run("run", 0.0, "none"), session, "/data/out", UploadOptions(), 77, 88)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool.create(make_info(), tmp_path)


def test_a_spool_is_private_and_named_after_its_process(spool: Spool, tmp_path: Path) -> None:
    assert spool.path == tmp_path / f"smdist-{os.geteuid()}" / "run-worker_3-77-abcdefgh"
    for folder in (spool.path, spool.path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Spool.open(spool.path).info == spool.info


def test_an_existing_spool_is_not_taken_nor_harmed(spool: Spool, tmp_path: Path) -> None:
    (spool.path / "arena-0").write_bytes(b"captured")
    with pytest.raises(SpoolUnavailable, match="exists"):
        Spool.create(spool.info, tmp_path)
    assert (spool.path / "arena-0").read_bytes() == b"captured"


def test_a_root_of_somebody_else_is_refused(tmp_path: Path) -> None:
    private_root(tmp_path).mkdir(mode=0o755)
    private_root(tmp_path).chmod(0o755)
    with pytest.raises(SpoolUnavailable, match="SMDIST_SPOOL_DIR"):
        Spool.create(make_info(), tmp_path)


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    private_root(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpoolUnavailable, match="not a private folder"):
        Spool.create(make_info(), tmp_path)


def test_a_place_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolUnavailable, match="SMDIST_SPOOL_DIR"):
        Spool.create(make_info(), tmp_path / "file")


@pytest.mark.parametrize("content", [b"", b"{", b'{"run": 1}'])
def test_half_a_spool_is_none(spool: Spool, content: bytes) -> None:
    (spool.path / "spool.json").write_bytes(content)
    with pytest.raises(SpoolUnavailable):
        Spool.open(spool.path)


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(SpoolUnavailable, match="not a spool"):
        Spool.open(tmp_path)


def test_files_are_found_in_both_places(tmp_path: Path) -> None:
    spool = Spool.create(make_info(), tmp_path / "memory", tmp_path / "disk")
    overflow = private_root(tmp_path / "disk") / f"{spool.path.name}-overflow"
    assert spool.places == (spool.path,)
    assert spool.make_overflow() == spool.make_overflow() == overflow
    assert stat.S_IMODE(overflow.stat().st_mode) == 0o700
    (overflow / "arena-1").write_bytes(b"1")
    (spool.path / "arena-0").write_bytes(b"0")
    for name in ("arena-0", "arena-1"):
        with spool.open_for_reading(name) as handle:
            assert handle.read().decode() == name[-1]
        assert name in spool.names()
        spool.discard(name)
        with pytest.raises(SpoolUnavailable, match=name):
            spool.open_for_reading(name)


def test_removal_leaves_nothing(tmp_path: Path) -> None:
    spool = Spool.create(make_info(), tmp_path / "memory", tmp_path / "disk")
    (spool.make_overflow() / "arena-1").write_bytes(b"x")
    (spool.path / "arena-0").write_bytes(b"x")
    with spool.lock():
        spool.remove()
    assert list((tmp_path / "disk").iterdir()) == list((tmp_path / "memory").iterdir()) == []
    spool.remove()  # once more: no error


def test_removal_without_overflow_touches_no_other_folder(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty path is the current directory, to whoever forgets to ask."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "precious").write_text("")
    monkeypatch.chdir(work)
    assert spool.places == (spool.path,)
    spool.remove()
    assert (work / "precious").exists()
    with pytest.raises(SpoolUnavailable, match="no overflow folder"):
        spool.make_overflow()


def test_a_removal_that_was_interrupted_can_be_repeated(spool: Spool) -> None:
    """spool.json, by which the folder is found, goes after the content, and the lock after that."""
    for name in ("journal-000000", "zzz"):
        (spool.path / name).write_bytes(b"x")
    order: list[str] = []
    real = os.unlink

    def unlink(path: str, *, dir_fd: int) -> None:
        order.append(path)
        real(path, dir_fd=dir_fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        spool.remove()
    assert {"journal-000000", "doorbell", "zzz"} == set(order[:-2])
    assert order[-2:] == ["spool.json", "lock"]
    assert not spool.path.exists()


def test_spools_are_made_while_others_remove_the_empty_root(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            for _ in range(100):
                Spool.create(make_info(rank), tmp_path).remove()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- lock ------------------------------------------------------------------------------------------


def hold(path: Path, held: multiprocessing.synchronize.Event) -> None:
    with Spool.open(path).lock():
        held.set()
        threading.Event().wait()


def test_the_lock_is_for_one_and_freed_by_death(spool: Spool) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=hold, args=(spool.path, held))
    process.start()
    assert held.wait(60)
    with pytest.raises(SpoolBusy), spool.lock():
        pass
    process.kill()
    process.join()
    process.close()
    with spool.lock():
        pass


def test_a_removed_spool_cannot_be_locked(spool: Spool) -> None:
    (spool.path / "spool.json").unlink()
    with pytest.raises(SpoolUnavailable, match="gone"), spool.lock():
        pass
    spool.remove()
    with pytest.raises(SpoolUnavailable, match="gone"), spool.lock():
        pass


# -- doorbell --------------------------------------------------------------------------------------


def test_the_doorbell_never_blocks(spool: Spool) -> None:
    bell, other = Doorbell(spool), Doorbell(spool)
    for _ in range(100_000):
        bell.ring()
    other.drain()
    with pytest.raises(BlockingIOError):
        os.read(other.fileno(), 1)
    bell.ring()
    assert os.read(other.fileno(), 10) == b"!"
    other.close()
    bell.ring()  # nobody listens
    bell.close()
    bell.close()


def test_info_survives_newer_fields(spool: Spool) -> None:
    fields = msgspec.json.decode((spool.path / "spool.json").read_bytes())
    fields["added_later"] = 1
    (spool.path / "spool.json").write_bytes(msgspec.json.encode(fields))
    assert Spool.open(spool.path).info == spool.info
    assert spool_name(spool.info) == spool.path.name


@pytest.mark.parametrize("key", ["linger_s", "drain_deadline_s"])
def test_a_number_that_was_written_as_null_is_the_default(spool: Spool, key: str) -> None:
    fields = msgspec.json.decode((spool.path / "spool.json").read_bytes())
    fields["upload"][key] = None
    (spool.path / "spool.json").write_bytes(msgspec.json.encode(fields))
    assert Spool.open(spool.path).info == spool.info


# -- being made ------------------------------------------------------------------------------------


def test_what_is_being_made_is_no_spool_yet(tmp_path: Path) -> None:
    with Spool.creating(make_info(), tmp_path) as spool:
        JournalWriter(spool).close()
        with pytest.raises(SpoolUnavailable, match="is not a spool"):
            Spool.open(spool.path)
        remove_leftovers(private_root(tmp_path))
        assert (spool.path / "journal-000000").exists()
    assert Spool.open(spool.path).info == spool.info
    remove_leftovers(private_root(tmp_path))
    with spool.lock():
        pass


def test_a_spool_in_a_relative_place_knows_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMPDIR may be relative."""
    monkeypatch.chdir(tmp_path)
    spool = Spool.create(make_info(), Path("memory"), Path("disk"))
    monkeypatch.chdir("/")
    assert spool.make_overflow().parent == private_root(tmp_path / "disk")
    assert Spool.open(tmp_path / "memory" / spool.path.relative_to(tmp_path / "memory")).places
    spool.remove()
    assert not list((tmp_path / "disk").iterdir())


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    making = Spool.creating(make_info(), tmp_path, disk)
    spool = making.__enter__()
    (spool.make_overflow() / "journal-000000").touch()
    interrupt = KeyboardInterrupt()
    assert not making.__exit__(KeyboardInterrupt, interrupt, None)
    assert [path for path in tmp_path.rglob("*") if path != disk] == []


def test_a_child_that_is_forked_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with Spool.creating(make_info(), tmp_path) as spool:
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # until the test has ended, in whatever way
            os._exit(0)
    try:
        with spool.lock():
            pass
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def die(info: SpoolInfo, root: Path) -> None:
    with Spool.creating(info, root, root / "disk") as spool:
        JournalWriter(spool).close()
        (spool.make_overflow() / "journal-000001").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a process left that was killed while it made its spool."""
    info = make_info(session_id="killed")
    process = multiprocessing.get_context("spawn").Process(target=die, args=(info, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    process.close()
    path = private_root(tmp_path) / spool_name(info)
    assert {"doorbell", "lock", "journal-000000"} <= {entry.name for entry in path.iterdir()}
    assert list(private_root(tmp_path / "disk").iterdir())
    return path


def test_what_a_killed_process_was_making_is_removed_by_the_next(
    killed: Path, tmp_path: Path
) -> None:
    spool = Spool.create(make_info(), tmp_path)
    assert list(private_root(tmp_path).iterdir()) == [spool.path]
    assert not list((tmp_path / "disk").iterdir()), "its overflow"


def test_what_is_in_use_or_holds_something_else_is_not_swept(killed: Path) -> None:
    handle = os.open(killed / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert not remove_leftover(killed)
    os.close(handle)
    (killed / "notes.txt").write_text("mine")
    assert not remove_leftover(killed)
    (killed / "notes.txt").unlink()
    assert remove_leftover(killed)
    assert not killed.exists()


def test_a_lock_that_another_one_replaced_is_none(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our open and our flock somebody swept the folder, and a maker has it now."""
    real = fcntl.flock

    def flock(handle: int, how: int) -> None:
        if how != fcntl.LOCK_UN:
            (killed / "lock").unlink()
            (killed / "lock").touch(0o600)
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert not remove_leftover(killed)
    assert (killed / "journal-000000").exists()


@pytest.mark.slow
def test_spools_are_created_while_others_remove_leftovers(tmp_path: Path) -> None:
    """Whoever sweeps may take a folder that is empty; never one with something in it."""
    context = multiprocessing.get_context("spawn")
    done = context.Event()
    sweepers = [
        context.Process(target=sweep_until, args=(private_root(tmp_path), done)) for _ in range(2)
    ]
    for process in sweepers:
        process.start()
    try:
        for number in range(300):
            with Spool.creating(make_info(session_id=f"{number:08}"), tmp_path) as spool:
                (spool.path / "journal-000000").write_bytes(b"x")
            assert (spool.path / "journal-000000").exists()
            assert Spool.open(spool.path).info == spool.info
            spool.remove()
    finally:
        done.set()
        for process in sweepers:
            process.join()
    assert [process.exitcode for process in sweepers] == [0, 0]


def sweep_until(root: Path, done: multiprocessing.synchronize.Event) -> None:
    while not done.is_set():
        remove_leftovers(root)
