"""Whatever takes the place of a file of a spool, also after the spool was opened, is not touched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from smdist.errors import NotPrivate, SpoolUnavailable
from smdist.format.manifest import Run, Session
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.spool.journal import JournalReader, JournalWriter
from smdist.workers.spool.private_files import private_root, remove_folder, why_not_private
from smdist.workers.spool.spool import Doorbell, Spool, SpoolInfo, UploadOptions
from smdist.workers.upload.batch import Arenas

CONTENT = b"mine" * 2000


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    session = Session("s" * 16, 0, 1, 0, "all", 0.0, "host", os.getpid(), "")
    info = SpoolInfo(Run("r", 0.0, "none"), session, "out", UploadOptions(), 1, 0)
    made = Spool.create(info, tmp_path / "root", tmp_path / "disk")
    JournalWriter(made).close()
    AckPage(made.path / "ack_page").close()
    (made.path / "arena-0").write_bytes(b"captured")
    return made


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.write_bytes(CONTENT)
    return path


def lock(spool: Spool) -> None:
    with spool.lock():
        pass


def make(path: Path, mode: int) -> None:
    path.write_bytes(CONTENT)
    path.chmod(mode)


USES: dict[str, Callable[[Spool], object]] = {
    "arena-0": lambda spool: Arenas(spool).read(0, 0, 4),
    "journal-000000": lambda spool: JournalReader(spool).read(),
    "ack_page": lambda spool: AckPage(spool.path / "ack_page"),
    "doorbell": Doorbell,
    "lock": lock,
    "spool.json": lambda spool: Spool.open(spool.path),
}

PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, mine: path.symlink_to(mine),
    "hard link": lambda path, mine: os.link(mine, path),
    "pipe": lambda path, _: os.mkfifo(path),
    "folder": lambda path, _: path.mkdir(),
    "open to others": lambda path, _: make(path, 0o620),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", USES)
def test_what_takes_the_place_of_a_file_is_refused(
    spool: Spool, mine: Path, name: str, plant: str
) -> None:
    path = spool.path / name
    path.unlink()
    PLANTS[plant](path, mine)
    if (name, plant) == ("doorbell", "pipe"):
        Doorbell(spool).close()
        return
    with pytest.raises(NotPrivate, match=str(path)):
        USES[name](spool)
    assert mine.read_bytes() == CONTENT
    assert os.path.lexists(path)


def test_a_link_in_the_place_of_a_new_file_is_not_written_through(spool: Spool, mine: Path) -> None:
    (spool.path / "spool.new").symlink_to(mine)
    (spool.path / "journal-000001").symlink_to(mine)
    spool.enter(spool.info.run, spool.info.session)
    with pytest.raises(NotPrivate, match="journal-000001 is a link"):
        Spool.open(spool.path)
    (spool.path / "journal-000001").unlink()
    assert Spool.open(spool.path).info.entered
    assert mine.read_bytes() == CONTENT


def test_an_overflow_that_became_a_link_is_neither_used_nor_emptied(
    spool: Spool, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "arena-1").write_bytes(CONTENT)
    spool.make_overflow().rmdir()
    spool.overflow.symlink_to(elsewhere)
    with pytest.raises(NotPrivate, match="is a link"):
        spool.make_overflow()
    with pytest.raises(NotPrivate, match="is a link"):
        spool.open_for_reading("arena-1")
    spool.remove()
    assert not spool.path.exists()
    assert (elsewhere / "arena-1").read_bytes() == CONTENT


@pytest.mark.parametrize("overflow", ["mine", "smdist-{uid}/another-overflow", "smdist-{uid}/.."])
def test_an_overflow_that_is_not_that_of_the_spool_is_refused(
    spool: Spool, tmp_path: Path, overflow: str
) -> None:
    named = str(tmp_path / overflow.format(uid=os.geteuid()))
    text = (spool.path / "spool.json").read_text().replace(str(spool.overflow), named)
    (spool.path / "spool.json").write_text(text)
    with pytest.raises(SpoolUnavailable, match="as its own"):
        Spool.open(spool.path)


def test_only_folders_in_a_private_root_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "precious"
    folder.mkdir(mode=0o700)
    (folder / "thesis").write_text("")
    remove_folder(folder)
    remove_folder(Path(os.path.relpath(folder)))
    assert (folder / "thesis").exists()


def test_a_spool_lies_in_a_private_root(spool: Spool, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    spool.path.rename(elsewhere)
    with pytest.raises(SpoolUnavailable, match=f"folders called smdist-{os.geteuid()}"):
        Spool.open(elsewhere)


def test_why_a_root_is_refused(tmp_path: Path) -> None:
    root = private_root(tmp_path)
    assert why_not_private(root) == ""
    root.mkdir(mode=0o700)
    assert why_not_private(root) == ""
    root.chmod(0o710)
    assert why_not_private(root) == f"{root} is open to others (mode 710)"
    root.rmdir()
    root.write_text("")
    assert "has the wrong type" in why_not_private(root)
