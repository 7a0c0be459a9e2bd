from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from smdist.errors import SpoolUnavailable
from smdist.manifest import Run, Session
from smdist.workers.journal import JournalWriter
from smdist.workers.spool import (
    REHEARSAL,
    Doorbell,
    Spool,
    SpoolBusy,
    SpoolInfo,
    UploadOptions,
    private_root,
    spool_name,
    sweep_rehearsals,
)


def make_info(rank: int = 3, overflow: str = "") -> SpoolInfo:
    session = Session("abcdefghijkl", rank, 4, 2, "all", 0.0, "host", 77, "")
    return SpoolInfo(
        Run("run", 0.0, "none"), session, "/data/out", UploadOptions(), 77, 88, overflow
    )


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


def test_find_looks_in_both_places(tmp_path: Path) -> None:
    overflow = private_root(tmp_path / "disk") / "name"
    spool = Spool.create(make_info(overflow=str(overflow)), tmp_path / "memory")
    assert spool.places == (spool.path,)
    assert spool.make_overflow() == spool.make_overflow() == overflow
    assert stat.S_IMODE(overflow.stat().st_mode) == 0o700
    (overflow / "arena-1").write_bytes(b"")
    (spool.path / "arena-0").write_bytes(b"")
    assert spool.find("arena-1") == overflow / "arena-1"
    assert spool.find("arena-0") == spool.path / "arena-0"
    with pytest.raises(SpoolUnavailable, match="arena-2"):
        spool.find("arena-2")


def test_removal_leaves_nothing(tmp_path: Path) -> None:
    overflow = private_root(tmp_path / "disk") / "name"
    spool = Spool.create(make_info(overflow=str(overflow)), tmp_path / "memory")
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
    with pytest.raises(SpoolUnavailable, match="no other place"):
        spool.make_overflow()


def test_a_removal_that_was_interrupted_can_be_repeated(spool: Spool) -> None:
    """spool.json, by which the folder is found, goes last."""
    (spool.path / "journal-000000").write_bytes(b"x")
    order: list[str] = []
    real = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        order.append(path.name)
        real(path, missing_ok)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        spool.remove()
    assert {"journal-000000", "doorbell"} <= set(order)
    assert "spool.json" not in order
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


def test_a_rehearsal_is_no_spool_and_leaves_nothing(tmp_path: Path) -> None:
    info = make_info()
    with Spool.rehearsed(info, tmp_path) as rehearsal:
        JournalWriter(rehearsal).close()
        assert not list(private_root(tmp_path).glob("*/spool.json"))
        with pytest.raises(SpoolUnavailable, match="is not a spool"):
            Spool.open(rehearsal.path)
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_of_the_dead_is_swept_and_that_of_the_living_is_not(tmp_path: Path) -> None:
    folder, info = private_root(tmp_path), rehearsal_info("first")
    dead = multiprocessing.get_context("spawn").Process(target=die, args=(info, tmp_path))
    dead.start()
    dead.join()
    assert {path.name for path in (folder / spool_name(info)).iterdir()} == {"doorbell", "lock"}
    with Spool.rehearsed(rehearsal_info("second"), tmp_path) as living:
        assert list(folder.iterdir()) == [living.path]
        sweep_rehearsals(folder)
        assert (living.path / "doorbell").exists()
    assert not list(tmp_path.iterdir())


def die(info: SpoolInfo, root: Path) -> None:
    with Spool.rehearsed(info, root):
        os.kill(os.getpid(), signal.SIGKILL)


def rehearsal_info(session: str) -> SpoolInfo:
    info = make_info()
    return msgspec.structs.replace(
        info,
        run=msgspec.structs.replace(info.run, run_id=REHEARSAL),
        session=msgspec.structs.replace(info.session, session=session),
    )
