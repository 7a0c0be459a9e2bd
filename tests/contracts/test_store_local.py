"""What a directory adds to the contract: death of writers, full and forbidden file systems."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smdist.errors import (
    ConfigurationError,
    CorruptObject,
    ObjectExists,
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreFull,
)
from smdist.storage import LocalStore, check_writable, open_store

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions do not stop root, so be nobody for a moment; threads follow."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*"))


# -- atomicity ---------------------------------------------------------------------------------

WRITER = """
import asyncio, sys
from smdist.storage import LocalStore
async def main():
    store = LocalStore(sys.argv[1])
    block = bytes(range(256)) * 4096
    print("ready", flush=True)
    n = 0
    while True:
        await store.put("big", [block] * 48)
        n += 1
        print(n, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("moment", range(6))
def test_a_killed_writer_leaves_nothing_or_all(tmp_path: Path, moment: int) -> None:
    root = tmp_path / "store"
    block = bytes(range(256)) * 4096
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        # In the middle of a put: a temporary exists and has grown to a share of its size.
        _wait_for_temporary(root, moment * len(block) * 8)
        writer.send_signal(signal.SIGKILL)
    store = LocalStore(root)
    keys = asyncio.run(_list(store))
    assert keys in ([], ["big"])
    if keys:
        assert (root / "big").read_bytes() == block * 48
    asyncio.run(_put(store, "big", b"next"))
    assert (root / "big").read_bytes() == b"next"


def _wait_for_temporary(root: Path, size: int) -> None:
    deadline = time.monotonic() + 30
    while _largest(root / ".tmp") < size:
        assert time.monotonic() < deadline, "the writer never came so far"


def _largest(folder: Path) -> int:
    try:
        return max((path.stat().st_size for path in folder.iterdir()), default=-1)
    except FileNotFoundError:
        return -1


async def _list(store: LocalStore) -> list[str]:
    return list(await store.list())


async def _put(store: LocalStore, key: str, data: bytes, if_absent: bool = False) -> None:
    await store.put(key, [data], if_absent=if_absent)


def test_a_killed_check_is_removed_by_the_next_start(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    folder = tmp_path / ".tmp"
    folder.mkdir()
    left, young, live = (
        folder / f"check-{pid}-{name}"
        for pid, name in ((process.pid, "old"), (process.pid, "young"), (os.getpid(), "live"))
    )
    other = folder / "0123"  # of a put that may still be under way
    for path in (left, young, live, other):
        path.write_bytes(bytes(64 << 10))
    for path in (left, live, other):
        os.utime(path, (time.time() - 60,) * 2)
    asyncio.run(LocalStore(tmp_path).check())
    assert sorted(folder.iterdir()) == sorted([other, young, live])


def test_a_reader_of_a_key_that_is_replaced_sees_one_or_the_other(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    size = 4 << 20

    async def main() -> None:
        await store.put("k", [b"a" * size])
        for _ in range(5):
            put = asyncio.ensure_future(store.put("k", [b"b" * size]))
            while not put.done():
                seen = await store.get("k")
                assert len(seen) == size
                assert seen[:1] * size == seen
            await put

    asyncio.run(main())


def test_conditional_puts_of_processes_have_one_winner(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from smdist.storage import LocalStore; sys.stdin.read();"
        "asyncio.run(LocalStore(sys.argv[1]).put('k', [sys.argv[2].encode()], if_absent=True))"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(i)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(4)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.close()
        racer.stdin = None
    errors = [racer.communicate()[1] for racer in racers]
    winners = [i for i, racer in enumerate(racers) if racer.returncode == 0]
    assert len(winners) == 1
    assert all("ObjectExists" in error for i, error in enumerate(errors) if i not in winners)
    assert (tmp_path / "k").read_text() == str(winners[0])


def test_without_hard_links_a_conditional_put_still_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store = LocalStore(tmp_path)
    asyncio.run(_put(store, "k", b"first", if_absent=True))
    with pytest.raises(ObjectExists):
        asyncio.run(_put(store, "k", b"second", if_absent=True))
    assert (tmp_path / "k").read_bytes() == b"first"


def test_stale_temporaries_are_invisible_and_go_when_old(tmp_path: Path) -> None:
    hidden = tmp_path / ".tmp"
    hidden.mkdir()
    (hidden / "fresh").write_bytes(b"x")
    (hidden / "old").write_bytes(b"x")
    os.utime(hidden / "old", (1, 1))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".nfs0001").write_bytes(b"x")
    store = LocalStore(tmp_path)
    assert asyncio.run(_list(store)) == []
    asyncio.run(_put(store, "k", b"v"))
    assert asyncio.run(_list(store)) == ["k"]
    assert files(hidden) == ["fresh"]


def test_close_leaves_no_folder_of_ours(tmp_path: Path) -> None:
    async def main() -> None:
        store = LocalStore(tmp_path)
        await store.put("k", [b"v"])
        await store.close()

    asyncio.run(main())
    assert files(tmp_path) == ["k"]


def test_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        asyncio.run(_put(LocalStore(tmp_path / "s"), "a/k", b"v"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s/a/k").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "s/a").stat().st_mode) == 0o750


def test_writes_that_the_kernel_cuts_short_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, data: real(fd, [memoryview(data[0])[:3]]))
    asyncio.run(LocalStore(tmp_path).put("k", [b"abcd", b"e", b"fghijklmn"]))
    assert (tmp_path / "k").read_bytes() == b"abcdefghijklmn"


def test_durable_puts_too(tmp_path: Path) -> None:
    asyncio.run(_put(LocalStore(tmp_path, durable=True), "a/k", b"v"))
    assert (tmp_path / "a/k").read_bytes() == b"v"


# -- the loop ----------------------------------------------------------------------------------


def test_a_put_leaves_the_loop_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, gate, entered = os.writev, threading.Event(), threading.Event()

    def slow(*args: object) -> int:
        entered.set()
        assert gate.wait(30)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "writev", slow)

    async def main() -> None:
        put = asyncio.ensure_future(LocalStore(tmp_path).put("k", [b"v"]))
        await asyncio.to_thread(entered.wait, 30)
        gate.set()  # reached although the write hangs
        await put

    asyncio.run(main())
    assert (tmp_path / "k").read_bytes() == b"v"


def test_a_cancelled_put_gives_the_buffers_back_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gate, entered = os.writev, threading.Event(), threading.Event()
    writing = threading.Lock()

    def slow(*args: object) -> int:
        with writing:
            entered.set()
            assert gate.wait(30)
            return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "writev", slow)

    async def main() -> None:
        put = asyncio.ensure_future(LocalStore(tmp_path).put("k", [b"v"] * 3000))
        await asyncio.to_thread(entered.wait, 30)
        put.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not put.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert not writing.locked()

    asyncio.run(main())
    assert files(tmp_path) == [".tmp"]


# -- full, forbidden, wrong --------------------------------------------------------------------


def test_a_full_file_system(small_disk: Path) -> None:
    store = LocalStore(small_disk)
    asyncio.run(_put(store, "kept", b"v"))
    with pytest.raises(StoreFull, match="free some space") as caught:
        asyncio.run(_put(store, "a/big", bytes(64 << 20)))
    assert (caught.value.key, caught.value.operation) == ("a/big", "put")
    assert asyncio.run(_list(store)) == ["kept"]
    assert files(small_disk / ".tmp") == []
    asyncio.run(_put(store, "small", bytes(1 << 20)))
    assert asyncio.run(_list(store)) == ["kept", "small"]
    (small_disk / "filler").write_bytes(bytes(_free(small_disk)))
    with pytest.raises(StoreFull, match=str(small_disk)):
        check_writable(small_disk)


def _free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_bsize


def test_enospc_from_the_kernel_without_any_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same without a mount: the writes go to /dev/full, which is what a full disk answers."""
    real = os.writev
    with open("/dev/full", "wb", buffering=0) as full:
        monkeypatch.setattr(os, "writev", lambda _, data: real(full.fileno(), data))
        with pytest.raises(StoreFull, match="No space left"):
            asyncio.run(_put(LocalStore(tmp_path), "k", b"v"))
        with pytest.raises(StoreFull, match="choose another out_dir"):
            check_writable(tmp_path / "new")
    assert files(tmp_path / ".tmp") == []


def test_quota_counts_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "writev", over)
    with pytest.raises(StoreFull, match="quota"):
        asyncio.run(_put(LocalStore(tmp_path), "k", b"v"))


def test_a_directory_without_rights(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    asyncio.run(_put(LocalStore(locked), "a/k", b"v"))
    locked.chmod(0)
    tmp_path.chmod(0o755)
    store = LocalStore(locked)
    try:
        with unprivileged():
            with pytest.raises(StoreForbidden, match="may write"):
                asyncio.run(_put(store, "a/k", b"w"))
            with pytest.raises(StoreForbidden, match="may read it"):
                asyncio.run(store.get("a/k"))
            with pytest.raises(StoreForbidden):
                asyncio.run(_list(store))
            with pytest.raises(StoreForbidden):
                asyncio.run(store.delete("a/k"))
            with pytest.raises(StoreForbidden, match="choose a directory"):
                check_writable(locked)
    finally:
        locked.chmod(0o755)
    assert (locked / "a/k").read_bytes() == b"v"


def test_a_read_only_file_system(small_disk: Path) -> None:
    asyncio.run(_put(LocalStore(small_disk), "k", b"v"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StoreForbidden, match="Read-only"):
        asyncio.run(_put(LocalStore(small_disk), "k", b"w"))
    with pytest.raises(StoreForbidden):
        check_writable(small_disk)
    assert asyncio.run(LocalStore(small_disk).get("k")) == b"v"


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_path_that_is_a_file(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    store = LocalStore(tmp_path / path)
    with pytest.raises(StoreForbidden, match="file"):
        check_writable(tmp_path / path)
    with pytest.raises(StoreForbidden):
        asyncio.run(_put(store, "k", b"v"))
    assert asyncio.run(_list(store)) == []
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_an_object_below_another_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    asyncio.run(_put(store, "a", b"v"))
    with pytest.raises(StoreForbidden, match="reverse"):
        asyncio.run(_put(store, "a/b", b"v"))
    (tmp_path / "dir").mkdir()
    for if_absent in (False, True):
        with pytest.raises(StoreForbidden, match="reverse"):
            asyncio.run(_put(store, "dir", b"v", if_absent))
    assert files(tmp_path / ".tmp") == []


def test_other_trouble_is_a_plain_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "writev", broken)
    with pytest.raises(
        StoreError, match=r"error; check that the file system can be reached$"
    ) as caught:
        asyncio.run(_put(LocalStore(tmp_path), "k", b"v"))
    assert type(caught.value) is StoreError


# -- opening -----------------------------------------------------------------------------------


def test_check_writable_makes_the_directory_and_nothing_else(tmp_path: Path) -> None:
    check_writable(tmp_path / "deep/er")
    assert files(tmp_path) == ["deep", "deep/er"]


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert open_store("~/runs").url == str(tmp_path / "runs")
    assert open_store("runs/../runs/").url == str(tmp_path / "runs")
    assert open_store(Path("runs")).url == str(tmp_path / "runs")
    assert open_store("file:///data/a%20b#1").url == "/data/a b#1"
    assert open_store("file://localhost/data").url == "/data"
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "use a path"),
        ("nul\0", "use a path"),
        ("gs://bucket/x", "not gs://"),
        ("file://host/x", "another machine"),
    ],
)
def test_places_that_are_none(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_store(url)


# -- what somebody else has put there ----------------------------------------------------------


def _get(store: LocalStore, key: str) -> bytes:
    return asyncio.run(store.get(key))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    os.utime(folder / "secret", (1, 1))
    return folder


def test_a_link_to_a_file_is_refused_and_says_so(tmp_path: Path, outside: Path) -> None:
    store = LocalStore(tmp_path / "run")
    asyncio.run(_put(store, "a/real", b"v"))
    (tmp_path / "run/a/link").symlink_to(outside / "secret")
    (tmp_path / "run/a/inward").symlink_to(tmp_path / "run/a/real")
    for name in ("a/link", "a/inward"):
        with pytest.raises(CorruptObject, match=f"'{name}'.* symbolic link"):
            _get(store, name)
    assert asyncio.run(_list(store)) == ["a/inward", "a/link", "a/real"]


def test_a_linked_folder_is_neither_read_nor_listed_nor_written(
    tmp_path: Path, outside: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/a").symlink_to(outside)
    store = LocalStore(tmp_path / "run")
    actions = (
        lambda: store.get("a/secret"),
        lambda: store.list("a/"),
        lambda: store.list(),
        lambda: store.put("a/new", [b"x"]),
        lambda: store.put("a/new", [b"x"], if_absent=True),
        lambda: store.put("a/secret", [b"x"]),
        lambda: store.delete("a/secret"),
    )
    for action in actions:
        with pytest.raises(CorruptObject, match=r"'a'.* symbolic link"):
            asyncio.run(action())
    assert files(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"
    assert list(asyncio.run(store.folders())) == []
    assert list(asyncio.run(store.list("b"))) == []


def test_temporaries_of_another_place_are_left_alone(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.tmp").symlink_to(outside)
    with pytest.raises(CorruptObject, match=r"'\.tmp'.* symbolic link"):
        asyncio.run(_put(LocalStore(tmp_path / "run"), "k", b"v"))
    assert files(outside) == ["secret"]


def test_the_root_may_be_a_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "run").symlink_to(outside)
    store = LocalStore(tmp_path / "run")
    asyncio.run(_put(store, "a/k", b"v"))
    assert _get(store, "a/k") == b"v"
    assert asyncio.run(_list(store)) == ["a/k", "secret"]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "k"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(place))
    else:
        try:
            os.mknod(place, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        except PermissionError:
            place.symlink_to("/dev/zero")  # who may make no device can still point at one
    script = (
        "import asyncio, sys; from smdist.storage import LocalStore;"
        "asyncio.run(LocalStore(sys.argv[1]).get('k'))"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "CorruptObject" in done.stderr.splitlines()[-1]
    assert "'k'" in done.stderr.splitlines()[-1]


def test_a_folder_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    with pytest.raises(ObjectNotFound):
        _get(LocalStore(tmp_path), "k")


def test_a_sparse_object_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    with (tmp_path / "manifests/huge.json").open("wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(CorruptObject, match=f"{20 << 30} bytes, such an object may have"):
        _get(LocalStore(tmp_path), "manifests/huge.json")
    assert asyncio.run(LocalStore(tmp_path).get("manifests/huge.json", 1 << 30, (1 << 30) + 2)) == (
        b"\0\0"
    )
