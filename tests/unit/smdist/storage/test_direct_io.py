"""Large files past the page cache: the same bytes, whatever the buffers and the file system."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdist.storage import direct_io
from smdist.storage.direct_io import DirectWriter, drop_front

MIB = 1 << 20


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def nothing() -> None:
    pass


def store(path: Path, chunks: list[bytes], writer: DirectWriter) -> int:
    """Write them all; how many bytes went past the cache."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        views = [memoryview(chunk) for chunk in chunks]
        writer.write(descriptor, views, nothing)
        assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        past = sum(map(len, chunks)) - sum(view.nbytes for view in views)
        while views:
            drop_front(views, os.writev(descriptor, views[:1000]))
    finally:
        os.close(descriptor)
    return past


def pieces(sizes: list[int]) -> list[bytes]:
    return [bytes([n % 251]) * size for n, size in enumerate(sizes)]


def is_cached(path: Path) -> bool:
    """Tell whether the file is in the cache at every MiB: the kernel may read a page or so ahead."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return all(
            os.preadv(descriptor, [bytearray(4096)], at, os.RWF_NOWAIT) > 0
            for at in range(0, path.stat().st_size, MIB)
        )
    except BlockingIOError:
        return False
    except OSError:  # it does not know how to answer at once: a file system in memory
        return True
    finally:
        os.close(descriptor)


@pytest.fixture
def direct(tmp_path: Path) -> None:
    """Only where the file system takes O_DIRECT; without it everything goes the usual way."""
    descriptor = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        os.write(descriptor, mmap.mmap(-1, 4096))
    except OSError as error:
        pytest.skip(f"the file system of {tmp_path} knows no direct writes: {error}")
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("size", [MIB, 2 * MIB, 2 * MIB + 1, 4 * MIB - 1, 5 * MIB + 4097])
def test_all_but_the_end_goes_past_the_cache(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    assert store(tmp_path / "file", [data], DirectWriter()) == size - size % 4096
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.usefixtures("direct")
def test_nothing_of_it_is_in_the_cache(tmp_path: Path) -> None:
    if is_cached(tmp_path / "probe"):
        pytest.skip(f"the file system of {tmp_path} is in memory")
    store(tmp_path / "file", [bytes(4 * MIB)], DirectWriter())
    assert not is_cached(tmp_path / "file")
    (tmp_path / "usual").write_bytes(bytes(4 * MIB))
    assert is_cached(tmp_path / "usual")


@settings(max_examples=40)
@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=12))
def test_any_pieces_make_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces"
    chunks = pieces([*sizes, MIB])
    store(path, chunks, DirectWriter())
    assert path.read_bytes() == b"".join(chunks)


def test_thousands_of_small_pieces(tmp_path: Path) -> None:
    chunks = pieces([4100] * 3000)
    store(tmp_path / "file", chunks, DirectWriter())
    assert (tmp_path / "file").read_bytes() == b"".join(chunks)


def test_small_files_go_the_usual_way(tmp_path: Path) -> None:
    assert store(tmp_path / "file", [bytes(MIB - 1)], DirectWriter()) == 0


@pytest.mark.usefixtures("direct")
def test_a_file_system_that_wants_it_otherwise_gets_it_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("smdist.storage.direct_io.os.write", refuse)
    data = os.urandom(3 * MIB)
    assert store(tmp_path / "file", [data], DirectWriter()) == 0
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.usefixtures("direct")
@pytest.mark.parametrize("most", [4096, 5000, 1])
def test_a_write_that_took_less_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(
            "smdist.storage.direct_io.os.write", lambda at, data: write(at, bytes(data[:most]))
        )
        patch.setattr(direct_io, "_set_direct", lambda descriptor, on: True)  # of any size
        data = os.urandom(MIB + 3)
        store(tmp_path / "file", [data], DirectWriter())
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.usefixtures("direct")
def test_errors_other_than_that_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("smdist.storage.direct_io.os.write", full)
    with pytest.raises(OSError, match="No space left"):
        store(tmp_path / "file", [bytes(MIB)], DirectWriter())


@pytest.mark.usefixtures("direct")
def test_a_slow_disk_is_spared_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, write = Clock(), os.write

    def slowly(seconds: float) -> Callable[[int, memoryview], int]:
        def take(descriptor: int, data: memoryview) -> int:
            clock.now += seconds
            return write(descriptor, data)

        return take

    writer, data = DirectWriter(clock), [bytes(8 * MIB)]
    monkeypatch.setattr("smdist.storage.direct_io.os.write", slowly(0.01))  # 200 MB/s
    assert store(tmp_path / "file", data, writer)
    monkeypatch.setattr("smdist.storage.direct_io.os.write", slowly(0.03))  # 70 MB/s
    assert store(tmp_path / "file", data, writer)
    assert not store(tmp_path / "file", data, writer)
    clock.now += 11
    assert store(tmp_path / "file", data, writer)
