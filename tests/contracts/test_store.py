"""The contract of `smdist.storage.store.Store`, run by every store.

A store joins by a `Harness` in `harness`: it makes stores over one place and can look at that place
without the API under test.
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pytest

from smdist.errors import CorruptObject, ObjectExists, ObjectNotFound, StoreError
from smdist.limits import max_object_bytes
from smdist.storage.in_memory import MemoryStore
from smdist.storage.local import LocalStore
from smdist.storage.store import Buffer, Store
from tests.contracts.s3_harness import S3Harness
from tests.servers.s3 import aws, moto, rclone

__all__ = ["aws", "moto", "rclone"]  # fixtures

T = TypeVar("T")


class Harness(Protocol):
    def open(self) -> Store:
        """Another handle on the same place."""

    def plant(self, key: str, data: bytes) -> None: ...

    def peek(self, key: str) -> bytes | None: ...

    def keys(self) -> list[str]:
        """Everything that is there and not hidden, sorted."""


class MemoryHarness:
    def __init__(self) -> None:
        self.store = MemoryStore("contract")

    def open(self) -> Store:
        return self.store

    def plant(self, key: str, data: bytes) -> None:
        self.store.objects[key] = data

    def peek(self, key: str) -> bytes | None:
        return self.store.objects.get(key)

    def keys(self) -> list[str]:
        return sorted(self.store.objects)


class LocalHarness:
    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> Store:
        return LocalStore(self.root)

    def plant(self, key: str, data: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def peek(self, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    def keys(self) -> list[str]:
        found = (p.relative_to(self.root) for p in self.root.rglob("*") if p.is_file())
        return sorted(str(p) for p in found if not p.parts[0].startswith("."))


@pytest.fixture(
    params=[
        "memory",
        "local",
        pytest.param("rclone", marks=pytest.mark.s3),
        pytest.param("moto", marks=pytest.mark.s3),
    ]
)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    if request.param == "memory":
        return MemoryHarness()
    if request.param == "local":
        return LocalHarness(tmp_path / "store")
    request.getfixturevalue("aws")
    return S3Harness(request.getfixturevalue(request.param), f"contract-{uuid.uuid4().hex}")


def keeps_files(harness: Harness) -> bool:
    """Where "a" and "a/b" cannot both be objects."""
    return isinstance(harness, LocalHarness) or is_rclone(harness)


def is_rclone(harness: Harness) -> bool:
    return isinstance(harness, S3Harness) and harness.files


def use(harness: Harness, work: Callable[[Store], Awaitable[T]]) -> T:
    async def session() -> T:
        store = harness.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(session())


def test_is_a_store(harness: Harness) -> None:
    assert isinstance(harness.open(), Store)
    assert harness.open().url


def test_put_joins_its_buffers_in_order(harness: Harness) -> None:
    numbers = np.arange(6, dtype="<i4").reshape(2, 3)
    buffers: list[Buffer] = [b"head", bytearray(b""), numbers.data, memoryview(b"tail")[1:], b""]
    use(harness, lambda store: store.put("a/b.bin", buffers))
    assert harness.peek("a/b.bin") == b"head" + numbers.tobytes() + b"ail"
    assert harness.keys() == ["a/b.bin"]


def test_put_of_more_buffers_than_one_call_takes(harness: Harness) -> None:
    buffers = [bytes([i % 251]) * (i % 7) for i in range(5000)]
    use(harness, lambda store: store.put("many", buffers))
    assert harness.peek("many") == b"".join(buffers)


def test_put_of_nothing_is_an_empty_object(harness: Harness) -> None:
    use(harness, lambda store: store.put("empty", []))
    assert harness.peek("empty") == b""
    assert use(harness, lambda store: store.get("empty")) == b""


def test_put_replaces_and_repeats(harness: Harness) -> None:
    harness.plant("k", b"a longer old value")
    for _ in range(2):
        use(harness, lambda store: store.put("k", [b"new"]))
        assert harness.peek("k") == b"new"


def test_a_conditional_put_keeps_what_is_there(harness: Harness) -> None:
    use(harness, lambda store: store.put("k", [b"first"], if_absent=True))
    with pytest.raises(ObjectExists) as caught:
        use(harness, lambda store: store.put("k", [b"second"], if_absent=True))
    assert (caught.value.key, caught.value.operation) == ("k", "put")
    assert harness.peek("k") == b"first"


def test_a_race_of_conditional_puts_has_one_winner(harness: Harness) -> None:
    async def race(store: Store) -> list[BaseException | None]:
        puts = (store.put("k", [bytes([i]) * 4096], if_absent=True) for i in range(16))
        return await asyncio.gather(*puts, return_exceptions=True)

    results = use(harness, race)
    winners = [i for i, result in enumerate(results) if result is None]
    if is_rclone(harness):  # it ignores the condition; what is there is whole all the same
        assert harness.peek("k") in [bytes([i]) * 4096 for i in winners]
        return
    assert len(winners) == 1
    assert all(isinstance(r, ObjectExists) for r in results if r is not None)
    assert harness.peek("k") == bytes(winners) * 4096


def test_concurrent_puts_of_one_key_leave_one_of_them_whole(harness: Harness) -> None:
    size = 1 << 18

    async def crowd(store: Store) -> list[bytes]:
        await store.put("k", [bytes(size)])
        puts = [store.put("k", [bytes([i]) * (size // 4)] * 4) for i in range(8)]
        gets = [store.get("k") for _ in range(8)]
        done = await asyncio.gather(*puts, *gets)
        return [value for value in done if value is not None]

    for seen in [*use(harness, crowd), harness.peek("k")]:
        assert seen is not None
        assert len(seen) == size
        assert len(set(seen)) == 1
    assert harness.keys() == ["k"]


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, None, b"0123456789"),
        (0, 10, b"0123456789"),
        (3, 7, b"3456"),
        (9, 10, b"9"),
        (4, None, b"456789"),
        (4, 99, b"456789"),
        (10, None, b""),
        (99, None, b""),
        (99, 200, b""),
        (5, 5, b""),
        (7, 3, b""),
        (0, 0, b""),
    ],
)
def test_ranges(harness: Harness, start: int, stop: int | None, expected: bytes) -> None:
    harness.plant("k", b"0123456789")
    assert use(harness, lambda store: store.get("k", start, stop)) == expected


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (0, -1)])
def test_ranges_do_not_count_from_the_end(harness: Harness, start: int, stop: int | None) -> None:
    harness.plant("k", b"0123456789")
    with pytest.raises(ValueError, match="start of an object"):
        use(harness, lambda store: store.get("k", start, stop))


def test_what_is_too_large_is_not_read_whole(harness: Harness) -> None:
    most = max_object_bytes("run.json")
    harness.plant("run.json", b"{" * most)
    harness.plant("below/run.json", b"{" * (most + 1))
    assert len(use(harness, lambda store: store.get("run.json"))) == most
    with pytest.raises(CorruptObject, match=f"{most + 1} bytes, such an object may have {most}"):
        use(harness, lambda store: store.get("below/run.json"))
    assert use(harness, lambda store: store.get("below/run.json", most, most + 9)) == b"{"


@pytest.mark.parametrize("key", ["nothing", "a/nothing", "a", "a/b/under-a-file"])
@pytest.mark.parametrize("stop", [None, 0])
def test_what_is_not_there(harness: Harness, key: str, stop: int | None) -> None:
    harness.plant("a/b", b"x")
    with pytest.raises(ObjectNotFound) as caught:
        use(harness, lambda store: store.get(key, 0, stop))
    assert (caught.value.key, caught.value.operation) == (key, "get")
    assert caught.value.url == harness.open().url


KEYS = ["a", "a-b/1", "a.b/1", "a/1", "a/10", "a/2", "aa/1", "b/c/d", "b/ü", "b/日本", "z"]


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/1", "b/c", "b/c/", "b/c/d", "nope", "nope/x"])
@pytest.mark.parametrize("after", ["", "a/1", "a/", "a/zzz", "b", "b/c/d", "zz"])
def test_lists_by_prefix_in_text_order(harness: Harness, prefix: str, after: str) -> None:
    keys = [key for key in KEYS if not (keeps_files(harness) and key == "a")]
    for key in reversed(keys):
        harness.plant(key, b"x")
    found = use(harness, lambda store: store.list(prefix, after=after))
    assert list(found) == sorted(k for k in keys if k.startswith(prefix) and k > after)


def test_an_empty_place_lists_nothing(harness: Harness) -> None:
    assert list(use(harness, lambda store: store.list())) == []


def test_delete(harness: Harness) -> None:
    harness.plant("a/b", b"x")
    harness.plant("a/c", b"x")
    beside = () if is_rclone(harness) else ("a/c/under-a-file", "a")  # it deletes "a/c" for these
    for key in ("a/b", "a/b", "never", *beside):
        use(harness, lambda store, key=key: store.delete(key))  # type: ignore[misc]
    assert harness.keys() == ["a/c"]


BAD_KEYS = [
    "",
    "/etc/passwd",
    "../out",
    "a/../../out",
    "a/./b",
    "a//b",
    "a/",
    ".tmp/x",
    "a/.hidden",
    "nul\0",
    "x" * 256,
    "/".join(["y" * 200] * 6),
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_keys_that_would_leave_the_store_or_not_fit_are_refused(
    harness: Harness, key: str, tmp_path: Path
) -> None:
    actions: Sequence[Callable[[Store], Awaitable[object]]] = (
        lambda store: store.put(key, [b"x"]),
        lambda store: store.get(key),
        lambda store: store.delete(key),
    )
    for action in actions:
        with pytest.raises(StoreError, match="not a key"):
            use(harness, action)
    assert harness.keys() == []
    assert not (tmp_path / "out").exists()


def test_names_that_are_odd_but_fit(harness: Harness) -> None:
    keys = ["Case", "case", "sp ace", "q?&#%41", "ü/日本/🔥", "x" * 255, "a..b/c.."]
    if not isinstance(harness, S3Harness):  # the servers of the tests do not take it
        keys.append("new\nline")
    for key in keys:
        use(harness, lambda store, key=key: store.put(key, [key.encode()]))  # type: ignore[misc]
    assert list(use(harness, lambda store: store.list())) == sorted(keys)
    for key in keys:
        assert harness.peek(key) == key.encode()


def test_check_leaves_nothing_behind(harness: Harness) -> None:
    use(harness, lambda store: store.check())
    assert harness.keys() == []


def test_errors_name_the_place_and_survive_pickling(harness: Harness) -> None:
    with pytest.raises(ObjectNotFound) as caught:
        use(harness, lambda store: store.get("k"))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert harness.open().url in str(again)
