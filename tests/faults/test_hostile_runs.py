"""Runs in which somebody has put other things than smdist writes.

A small run is built, one thing in it is changed, and a process with little memory reads it in every
way there is: nothing but errors of smdist, in seconds, and the object is named. Checksums are right:
whoever writes such an object can compute them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from smdist.cli.runs import merge
from smdist.format.block import crc32c
from smdist.format.dtypes import HeaderEntry, header_bytes, parse_header
from smdist.format.layout import _digest
from smdist.format.manifest import (
    CollectionInfo,
    RankManifest,
    RankSummary,
    SamplingChange,
    SamplingChanges,
    sampling_changes_key,
    summary_key,
)
from smdist.format.stored_json import decode, encode
from smdist.identity import ModeKeys
from smdist.limits import MAX_RANKS
from smdist.storage import LocalStore
from smdist.storage import loop_thread as sync
from tests.support.run_builder import RunBuilder, Saved

TRAIN = ModeKeys.TRAIN
READER = Path(__file__).with_name("hostile_reader.py")
DEADLINE_S = 120.0  # a hang; the machine may be slow
BIG = 20 << 30
HUGE = 1 << 70
NOBODY = 1_000_000_000_000
ESCAPES = "\x1b[2J\r\n\x9b31m\u202e\x07"


class SegmentReader:
    """The process that reads; another one after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def read(self, path: Path, *, little: bool = False) -> dict[str, Any]:
        if self._process is None:
            command = [sys.executable, str(READER)]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{'!' if little else ''}{path}\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(DEADLINE_S):
                self._process.kill()
                self.close()
                pytest.fail("it hangs")
        answer = self._process.stdout.readline()
        if not answer:
            pytest.fail(f"the reader died: {self.close()}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        return process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def reader() -> Iterator[SegmentReader]:
    made = SegmentReader()
    yield made
    made.close()


def build(root: Path) -> None:
    store = LocalStore(root)
    run = RunBuilder(store)
    for rank in range(2):
        writer = run.rank(rank, 2)
        writer.describe(CollectionInfo("mine", ("w",)))
        writer.attach_bytes = 1 << 16 if rank else 0
        for step in range(3):
            tensors = {"loss": np.float32(step + rank)}
            kept: dict[str, Any] = {
                **{
                    name: Saved(np.asarray(value), reductions=()) for name, value in tensors.items()
                },
            }
            if not rank:
                kept["w"] = np.arange(6, dtype=np.float32).reshape(2, 3)
                kept["only_reduced"] = Saved(np.ones(4, np.float32), raw=False, reductions=())
            writer.step(TRAIN, step, kept)
            if step == 1:
                writer.drop(TRAIN, step, "x").trouble("a trouble")
            writer.flush()
        writer.end()
        writer.beat(run.now)
        key = sampling_changes_key(writer.worker, 0)
        thinning = SamplingChange("train", 0, 0, 2, False, 0.1, run.now)
        sync.run(store.put(key, [encode(SamplingChanges(writer.worker, 0, 0.1, (thinning,)), key)]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run as its ranks left it, with a summary of rank 0; and the same merged."""
    folder = tmp_path_factory.mktemp("runs")
    plain, merged = folder / "plain", folder / "merged"
    build(plain)
    summarised = folder / "summarised"
    shutil.copytree(plain, summarised)
    session = json.loads((plain / SESSION).read_bytes())
    keys = sorted((plain / "manifests/worker_0").iterdir())
    manifests = [decode(p.read_bytes(), RankManifest, _key(plain, p)) for p in keys]
    made = msgspec.convert({"session": session, "manifests": ()}, RankSummary)
    key = summary_key("worker_0", 0)
    (summarised / "summaries/worker_0").mkdir(parents=True)
    whole = msgspec.structs.replace(made, manifests=tuple(manifests))
    (summarised / key).write_bytes(encode(whole, key))
    shutil.copytree(plain, merged)
    assert merge(str(merged), take_over=False) == 0
    return {"plain": plain, "merged": merged, "summarised": summarised}


# -- how a run is changed ------------------------------------------------------------------------

SESSION = "sessions/worker_0/000000.json"
MANIFEST = "manifests/worker_0/000000-00000000.json"
BEAT = "heartbeats/worker_0/000000.json"
COLLECTIONS = "collections/worker_0.json"
THINNED = "thinned/worker_0/000000.json"
SUMMARY = "summaries/worker_0/000000.json"
POINTER = "merged/current.json"

Change = Callable[[Path], str]
"""Changes the run there; what is to be named."""


def _key(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


def one_of(root: Path, pattern: str) -> str:
    return _key(root, min(root.glob(pattern)))


def load(root: Path, key: str) -> Any:
    found = json.loads((root / key).read_bytes())
    found.pop("crc32c", None)
    return found


def store(root: Path, key: str, value: Any) -> None:
    (root / key).write_bytes(encode(value, key))


def put(value: Any, *path: str | int, into: Any) -> None:
    for part in path[:-1]:
        into = into[part]
    into[path[-1]] = value


def field(pattern: str, value: Any, *path: str | int) -> Change:
    """One field of an object has another value."""

    def change(root: Path) -> str:
        key = one_of(root, pattern)
        found = load(root, key)
        put(value, *path, into=found)
        store(root, key, found)
        return key

    return change


def layout(value: Any, *path: str | int, sparse: bool = False) -> Change:
    """One field of the layout of rank 0's first step has another value, under its right digest."""

    def change(root: Path) -> str:
        manifest = load(root, MANIFEST)
        entry = manifest["steps"][0]
        found = json.loads((root / f"layouts/{entry[5]}.json").read_bytes())
        if callable(value):
            value(found)
        else:
            put(value, *path, into=found)
        data = json.dumps(found, separators=(",", ":")).encode()
        entry[5] = _digest(data)
        (root / f"layouts/{entry[5]}.json").write_bytes(data)
        store(root, MANIFEST, manifest)
        if sparse:
            os.truncate(root / entry[6], BIG + (1 << 20))
            return str(entry[6])
        return f"layouts/{entry[5]}.json"

    return change


def content(pattern: str, data: bytes) -> Change:
    def change(root: Path) -> str:
        key = one_of(root, pattern)
        (root / key).write_bytes(data)
        return key

    return change


def deep(pattern: str) -> Change:
    """Valid, and nested further than a reader may recurse; under its right checksum or digest."""

    def change(root: Path) -> str:
        key = one_of(root, pattern)
        (root / key).write_bytes(encode(msgspec.Raw(b'{"a":' + b"[" * 10**6 + b"}"), key))
        return key

    return change


def sparse(pattern: str) -> Change:
    def change(root: Path) -> str:
        key = one_of(root, pattern)
        os.truncate(root / key, BIG)
        return key

    return change


def instead(pattern: str, make: Callable[[Path], None]) -> Change:
    """Something else is there."""

    def change(root: Path) -> str:
        key = one_of(root, pattern)
        (root / key).unlink()
        make(root / key)
        return key

    return change


def fifo(pattern: str) -> Change:
    return instead(pattern, os.mkfifo)


def link(pattern: str) -> Change:
    return instead(pattern, lambda path: path.symlink_to("/etc/passwd"))


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory() as short:
        listener.bind(f"{short}/s")
        Path(short, "s").rename(path)


def linked_folder(name: str) -> Change:
    def change(root: Path) -> str:
        (root / name).rename(root.parent / f"elsewhere-{root.name}")
        (root / name).symlink_to(root.parent / f"elsewhere-{root.name}")
        return name

    return change


def chunk(alter: Callable[[dict[str, str], dict[str, np.ndarray[Any, Any]]], None]) -> Change:
    """A range of steps with other arrays or metadata, and a checksum that fits."""

    def change(root: Path) -> str:
        key = one_of(root, "merged/steps/*")
        data = (root / key).read_bytes()
        header = parse_header(data)
        body = data[header.size :]
        codes = {entry.name: entry.dtype for entry in header.entries}
        arrays = {
            e.name: np.frombuffer(body[e.start : e.stop], CODES[e.dtype]).reshape(e.shape)
            for e in header.entries
        }
        about = dict(header.metadata)
        alter(about, arrays)
        entries, made = [], b""
        for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize):
            code = {v: k for k, v in CODES.items()}.get(array.dtype.str, codes.get(name, "U8"))
            end = len(made) + array.nbytes
            entries.append(HeaderEntry(name, code, array.shape, len(made), end))
            made += array.tobytes()
        about["crc32c"] = f"{crc32c(made):08x}"
        (root / key).write_bytes(header_bytes(entries, about) + made)
        return key

    return change


CODES = {
    "I64": "<i8",
    "F64": "<f8",
    "U8": "|u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
}


def about(name: str, value: str) -> Change:
    return chunk(lambda found, _: found.update({name: value}))


def array(name: str, values: Any) -> Change:
    return chunk(lambda _, arrays: arrays.update({name: np.asarray(values)}))


def head(value: Any, *path: str | int) -> Change:
    return field("merged/heads/*", value, *path)


def row(value: Any, *path: str | int) -> Change:
    """Of the first rank in a head."""
    return head(value, "attempts", 0, "ranks", 0, *path)


def steps_run(value: Any, place: int) -> Change:
    return head(value, "attempts", 0, "chunks", 0, 3, 0, place)


def step(value: Any, place: int) -> Change:
    return field(MANIFEST, value, "steps", 0, place)


def tensor(value: Any, place: int) -> Change:
    return layout(value, "tensors", 1, place)


def huge_tensor(found: Any) -> None:
    """All of it fits together, in a block of 20 GB that the segment has."""
    elements = (BIG >> 2) - 1024
    for place, entry in enumerate(found["tensors"]):
        if entry[0] == "w":
            found["tensors"][place][2] = [elements]
            found["tensors"][place][4] = 4 * elements
    found["nbytes"] = found["nbytes"] + BIG


DROPS = [["merged/drops/x.json", 9, [[1, 0, 1, 0, 1, NOBODY, [[0, 1]]]]]]

PLAIN: dict[str, Change] = {
    **{
        f"session says a world of {n}": field(SESSION, n, "world_size") for n in (10**6, NOBODY, -1)
    },
    "session with a world beyond 64 bits": field(SESSION, HUGE, "world_size"),
    "session of a rank beyond all": field(SESSION, NOBODY, "rank"),
    "session of another rank": field(SESSION, 1, "rank"),
    "session of a negative attempt": field(SESSION, -1, "attempt"),
    "session with unknown workers": field(SESSION, "some", "include_workers"),
    "session with negative workers": field(SESSION, [-1], "include_workers"),
    "session with a list in place of a name": field(SESSION, [[]], "host"),
    "session of the far future": field(SESSION, 1e300, "started"),
    **{f"manifest says a world of {n}": field(MANIFEST, n, "world_size") for n in (10**6, NOBODY)},
    "manifest of a huge seq": field(MANIFEST, NOBODY, "seq"),
    "manifest of another rank": field(MANIFEST, 1, "rank"),
    "manifest of a rank beyond all": field(MANIFEST, NOBODY, "rank"),
    "manifest with records beyond 64 bits": field(MANIFEST, HUGE, "upto"),
    "manifest with negative records": field(MANIFEST, -1, "first"),
    "manifest in an unknown state": field(MANIFEST, "dead", "state"),
    "manifest of the far future": field(MANIFEST, 1e300, "time"),
    **{f"step of mode {n}": step(n, 0) for n in (0, 5, -1, HUGE)},
    **{f"mode step {n}": step(n, 1) for n in (HUGE, -1)},
    **{f"global step {n}": step(n, 2) for n in (HUGE, -1)},
    **{f"block {n}": step(n, 3) for n in (HUGE, -1)},
    **{f"block at {n}": step(n, 7) for n in (HUGE, -1)},
    "step of the far future": step(1e300, 9),
    "layout outside of the run": step("../../../etc/passwd", 5),
    "layout of a long name": step("a" * 1000, 5),
    "segment outside of the run": step("../../../../etc/passwd", 6),
    "segment by a whole path": step("/etc/passwd", 6),
    "segment with a zero byte": step("segments/\0", 6),
    "segment of a long name": step("a/" * 1000 + "a", 6),
    "dropped step beyond 64 bits": field(
        "manifests/worker_0/000000-00000001.json", HUGE, "dropped", 0, 1
    ),
    "heartbeat beyond 64 bits": field(BEAT, HUGE, "step"),
    "heartbeat of the far future": field(BEAT, 1e300, "time"),
    "thinned by nobody": field(THINNED, "nobody", "worker"),
    "thinned beyond 64 bits": field(THINNED, HUGE, "changes", 0, "mode_step"),
    "run of the far future": field("run.json", 1e300, "created"),
    "run of a text": field("run.json", "now", "created"),
    "layout with rows beyond memory": layout(NOBODY, "rows"),
    "layout with rows and no tensors": layout(3, "rows"),
    "layout with statistics outside": layout(10**15, "statistics_offset"),
    "layout with statistics before it": layout(-5, "statistics_offset"),
    "layout with checksums outside": layout(10**15, "checksums_offset"),
    "layout without checksums": layout(-1, "checksums_offset"),
    "layout beyond 64 bits": layout(HUGE, "nbytes"),
    "layout of nothing": layout(0, "nbytes"),
    "tensor of a negative shape": tensor([-2, -3], 2),
    "tensor of a shape that overflows": tensor([1 << 40, 1 << 40], 2),
    "tensor of another shape": tensor([5], 2),
    "tensor of many dimensions": tensor([1] * 100, 2),
    "tensor outside of its block": tensor(10**15, 3),
    "tensor before its block": tensor(-2, 3),
    "tensor of another size": tensor(10**15, 4),
    "tensor with a row outside": tensor(99, 5),
    "tensor in another place": tensor(NOBODY, 7),
    "manifest as a socket": instead(MANIFEST, bound),
    "segment as a socket": instead("segments/worker_0/*", bound),
    **{
        f"{folder} is a link": linked_folder(folder)
        for folder in ("manifests/worker_0", "segments")
    },
    "sessions is a link": linked_folder("sessions"),
}
EVERY = {
    "plain": (
        *("run.json", SESSION, MANIFEST, BEAT, COLLECTIONS, THINNED),
        *("layouts/*", "segments/worker_0/*"),
    ),
    "merged": (POINTER, "merged/heads/*", "merged/steps/*", "merged/leases/*", "merged/claims/*"),
}
SUMMARISED: dict[str, Change] = {
    "summary of another rank": field(SUMMARY, 1, "session", "rank"),
    "summary with a manifest of another rank": field(SUMMARY, NOBODY, "manifests", 1, "rank"),
    "summary with a manifest of rank 1": field(SUMMARY, 1, "manifests", 1, "rank"),
    "summary with a huge seq": field(SUMMARY, NOBODY, "manifests", 1, "seq"),
    "summary of nothing": field(SUMMARY, [], "manifests"),
    "summary beyond 64 bits": field(SUMMARY, HUGE, "manifests", 0, "steps", 0, 1),
    "deep summary": deep(SUMMARY),
    "sparse summary": sparse(SUMMARY),
    "summary as a pipe": fifo(SUMMARY),
}
MERGED: dict[str, Change] = {
    "pointer out of the run": field(POINTER, "../../etc/passwd", "head"),
    "pointer to nothing": field(POINTER, "", "head"),
    "pointer to a segment": field(POINTER, "segments/worker_0", "head"),
    "pointer beyond 64 bits": field(POINTER, HUGE, "number"),
    "pointer with an endless interval": field(POINTER, 1e300, "interval_s"),
    "head of a rank beyond all": row(NOBODY, 0),
    "head with a session beyond all": row(NOBODY, 1, "world_size"),
    "head with a heartbeat beyond 64 bits": row(["0.0", 0, 0, 1.0, 5.0, HUGE, 0], 2),
    "head with a state beyond 64 bits": row(HUGE, 3, 0),
    "head with a world beyond memory": row([[NOBODY, "all"]], 4),
    "head with unknown workers": row([[2, "none"]], 4),
    "head with an unknown mode": row([[9, 1]], 5),
    "head with manifests beyond 64 bits": row([[0, HUGE]], 9),
    "head with manifests that go back": row([[3, 1]], 9),
    "head with manifests twice": row([[0, 3], [1, 5]], 9),
    "head with a drop without a text": row([[0, 0, 1, 0, 0, 99, 4, 99]], 7),
    "head with a step beyond 64 bits": row(
        [[1, HUGE, 0, 0, True, "", "", 0, 0.0, 0.0]],
        10,
    ),
    "head of endless steps": steps_run(NOBODY, 4),
    "head of many steps": steps_run(1 << 24, 4),
    "head of no steps": steps_run(0, 4),
    "head of steps that stand still": steps_run(0, 1),
    "head of steps beyond 64 bits": steps_run(HUGE, 0),
    "head of strides beyond 64 bits": steps_run((1 << 62) - 1, 1),
    "head of ranks beyond memory": steps_run([[0, NOBODY]], 5),
    "head of ranks that nobody knows": steps_run([[0, MAX_RANKS]], 5),
    "head of ranks that go back": steps_run([[1, 0]], 5),
    "head of no ranks": steps_run([], 5),
    "head with open ranks that nobody knows": steps_run([[0, MAX_RANKS]], 7),
    "head with numbers of ranks that nobody knows": steps_run([[1, [[5, 9]]]], 9),
    "head of an unknown mode": head(9, "attempts", 0, "chunks", 0, 2),
    "head of a chunk without steps": head([], "attempts", 0, "chunks", 0, 3),
    "head of a chunk outside": head("../../etc/passwd", "attempts", 0, "chunks", 0, 0),
    "head of layouts outside": head(["../../etc/passwd"], "layout_packs"),
    "head of layouts that are none": head({"0" * 24: 1}, "layouts"),
    "head with endless drops": head(DROPS, "attempts", 0, "drops"),
    "head of an attempt beyond 64 bits": head(HUGE, "attempts", 0, "attempt"),
    "chunk with endless blocks": about("blocks", str(NOBODY)),
    "chunk with negative blocks": about("blocks", "-3"),
    "chunk with a number of many digits": about("blocks", "9" * 5000),
    "chunk of an unknown mode": about("mode", "9"),
    "chunk of no attempt": about("attempt", "x"),
    "chunk without layouts": about("layouts", "[]"),
    "chunk with deep layouts": about("layouts", "[" * 10**6),
    "chunk without names": about("names", "[]"),
    "chunk of ranks beyond all": array("ranks", [0, NOBODY]),
    "chunk of many ranks": array("ranks", np.arange(10**6)),
    "chunk of many steps": chunk(
        lambda _, arrays: arrays.update(
            {"ranks": np.arange(100_000), "mode_steps": np.arange(100_000)}
        )
    ),
    "chunk of steps that go back": array("mode_steps", [2, 1, 0]),
    "chunk of steps that are numbers": array("mode_steps", [0.0, 1.0, 2.0]),
    "chunk of offsets beyond the block": array("cells.offset.base", [1 << 62] * 3),
    "chunk of negative steps": array("cells.step.base", [-1] * 3),
    "chunk of layouts that are not there": array("cells.layout.base", [7] * 3),
    "chunk of times that are none": array("cells.time", np.full((3, 2), np.nan)),
    "chunk without flags": chunk(lambda _, arrays: arrays.__delitem__("cells.flags.base")),
    "chunk whose header has 20 GB": content("merged/steps/*", BIG.to_bytes(8, "little") + b"{"),
    "chunk with a deep header": content(
        "merged/steps/*", (10**6).to_bytes(8, "little") + b"[" * 10**6
    ),
}


def every(base: str) -> dict[str, Change]:
    made: dict[str, Change] = {}
    for key in EVERY[base]:
        made[f"sparse {key}"] = sparse(key)
        made[f"{key} as a pipe"] = fifo(key)
        made[f"{key} as a link"] = link(key)
        if not key.startswith(("segments", "merged/steps")):
            made[f"deep {key}"] = deep(key)
    return made


# Nothing is said of what is not asked for: other objects tell the same, or it was never needed.
UNNAMED = {
    "sparse segments/worker_0/*",  # it only got longer
    "summary",
    "merged/claims/*",
    "merged/leases/*",
}

CASES = [
    *(
        pytest.param("plain", change, id=name)
        for name, change in {**PLAIN, **every("plain")}.items()
    ),
    *(pytest.param("summarised", change, id=name) for name, change in SUMMARISED.items()),
    *(pytest.param("merged", change, id=n) for n, change in {**MERGED, **every("merged")}.items()),
]


@pytest.mark.parametrize(("base", "change"), CASES)
def test_a_strange_object_is_named_and_the_rest_is_read(
    base: str,
    change: Change,
    runs: dict[str, Path],
    reader: SegmentReader,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    root = tmp_path / "run"
    shutil.copytree(runs[base], root)
    named = change(root)
    found = reader.read(root)
    assert not found["strange"], "\n".join(found["strange"][:1])
    assert found["seconds"] < DEADLINE_S / 2
    silent = any(part in request.node.name for part in UNNAMED)
    said = "\n".join([*found["told"], *found["raw"]])
    assert silent or named in said, said


@pytest.mark.parametrize("where", ["reason", "troubles", "host", "name"])
def test_no_escape_sequence_reaches_a_terminal(
    where: str, runs: dict[str, Path], reader: SegmentReader, tmp_path: Path
) -> None:
    root = tmp_path / f"run{ESCAPES[:4]}"
    shutil.copytree(runs["plain"], root)
    last = max((root / "manifests/worker_0").iterdir())
    found = load(root, _key(root, last))
    found["state"] = "lost"
    found["reason" if where != "troubles" else where] = (
        [f"evil{ESCAPES}"] if where == "troubles" else f"evil{ESCAPES}"
    )
    store(root, _key(root, last), found)
    if where == "name":
        layout(f"evil{ESCAPES}", "tensors", 1, 0)(root)
    if where == "host":
        field(SESSION, ESCAPES, "host")(root)
    answer = reader.read(root)
    assert not answer["strange"]
    printed = "".join(answer["raw"])
    assert "evil" in printed or where in ("name", "host", "troubles")
    assert all(c.isprintable() or c == "\n" for c in printed), printed
    assert "\nevil" not in printed


def test_a_tensor_of_20_gb_is_an_error_that_names_it(
    runs: dict[str, Path], reader: SegmentReader, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(runs["plain"], root)
    named = layout(huge_tensor, sparse=True)(root)
    found = reader.read(root)
    assert not found["strange"], found["strange"][0]
    assert any(named in text and "memory" in text for text in found["told"]), found["told"]


@pytest.mark.parametrize("base", ["plain", "merged"])
def test_numbers_that_are_vast_and_allowed_cost_nothing(
    base: str, runs: dict[str, Path], reader: SegmentReader, tmp_path: Path
) -> None:
    """Many steps, of a world of which two ranks came: their product would be gigabytes."""
    root = tmp_path / "run"
    shutil.copytree(runs[base], root)
    if base == "plain":
        manifest = load(root, MANIFEST)
        template = manifest["steps"][0]
        more = [[*template[:1], n, n, 10 + n, *template[4:]] for n in range(3, 1500)]
        store(root, MANIFEST, {**manifest, "steps": [*manifest["steps"], *more]})
        field(SESSION, MAX_RANKS, "world_size")(root)
    else:
        row([[0, 4], [10**9, 1 << 61]], 9)(root)
        row([[MAX_RANKS, "all"]], 4)(root)
    found = reader.read(root, little=True)
    assert not found["strange"], found["strange"][0]
    assert f"attempt 0: {MAX_RANKS} ranks expected" in found["raw"][0]
    assert f"never started: worker_2 to worker_{MAX_RANKS - 1}" in found["raw"][0]
    assert not any("Corrupt" in text for text in found["told"])


def test_a_world_for_each_of_many_attempts_is_refused(
    runs: dict[str, Path], reader: SegmentReader, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(runs["plain"], root)
    for attempt in range(1, 12):
        key = f"sessions/worker_0/{attempt:06d}.json"
        session = {**load(root, SESSION), "attempt": attempt, "world_size": MAX_RANKS}
        store(root, key, session)
    found = reader.read(root)
    assert not found["strange"], found["strange"][0]
    assert "ranks are said to take part and never began" in found["told"][0]
    assert all("ranks are said to take part and never began" in text for text in found["raw"])


EXTREME = [0, -1, 1, 1 << 31, (1 << 53) + 1, (1 << 62) - 1, 1 << 63, -(1 << 63), HUGE, 1e300]


def places(value: Any) -> Iterator[list[str | int]]:
    """Where numbers are in it."""
    if isinstance(value, dict):
        for name, inside in value.items():
            yield from ([name, *rest] for rest in places(inside))
    elif isinstance(value, list):
        for place, inside in enumerate(value):
            yield from ([place, *rest] for rest in places(inside))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield []


@pytest.mark.parametrize("base", ["plain", "merged", "summarised"])
def test_numbers_at_random(
    base: str, runs: dict[str, Path], reader: SegmentReader, tmp_path: Path
) -> None:
    """Some numbers of some objects at once; whatever it means, nothing but errors of smdist."""
    random = np.random.default_rng(7)
    keys = [
        _key(runs[base], p) for p in sorted(runs[base].rglob("*.json")) if "layouts" not in str(p)
    ]
    for number in range(12):
        root = tmp_path / str(number)
        shutil.copytree(runs[base], root)
        changed = []
        for key in random.choice(keys, 3, replace=False).tolist():
            found = load(root, key)
            where = list(places(found))
            if where:
                path = where[random.integers(len(where))]
                value = EXTREME[random.integers(len(EXTREME))]
                put(value, *path, into=found)
                store(root, key, found)
                changed.append((key, path, value))
        answer = reader.read(root)
        assert not answer["strange"], (changed, answer["strange"][0])
        shutil.rmtree(root)


def test_the_reader_is_held_to_its_memory(reader: SegmentReader, tmp_path: Path) -> None:
    """What these tests rely on."""
    began = time.monotonic()
    script = (
        "import resource; from tests.faults import hostile_reader;"
        "hostile_reader.sys.stdin = iter(()); hostile_reader.main(); bytes(4 << 30)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.stderr.strip().endswith("MemoryError"), done.stderr
    assert time.monotonic() - began < DEADLINE_S
