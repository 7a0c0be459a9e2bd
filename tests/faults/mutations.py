"""Runs of known content, random damage to their objects, and all that a trial then says of them.

Everything is by number: run, kind of damage, place. What was damaged is put back afterwards, so a run
is built once.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from smdist.coordination.service.merge_once import merge_once
from smdist.errors import SmdistError
from smdist.format.manifest import CollectionInfo
from smdist.identity import ModeKeys
from smdist.storage import MemoryStore
from smdist.storage import loop_thread as sync
from smdist.storage.store import Store
from smdist.trials import create_trial
from smdist.trials.trial import Trial
from smdist.workers.upload.summaries import Summary
from tests.support.run_builder import RankWriter, RunBuilder, Saved
from tests.support.spans import Roller

TRAIN, EVAL = ModeKeys.TRAIN, ModeKeys.EVAL


class Cell(NamedTuple):
    """A value that a run holds; `what` is "raw", or a reduction."""

    attempt: int
    rank: int
    mode: ModeKeys
    step: int
    name: str
    what: str = "raw"


@dataclass
class Known:
    """A run in a store, and what is in it."""

    store: Store
    objects: dict[str, bytes] = field(default_factory=dict)
    truth: dict[Cell, Any] = field(default_factory=dict)
    foreign: dict[str, bytes] = field(default_factory=dict)
    right: Reading | None = None

    def snapshot(self) -> None:
        keys = sync.run(self.store.list())
        self.objects = {key: sync.run(self.store.get(key)) for key in keys}


# -- building --------------------------------------------------------------------------------------


class Author:
    """Writes values that no two places share."""

    def __init__(self, store: Store, run_id: str, seed: int) -> None:
        self.known = Known(store)
        self._chance = np.random.default_rng(seed)
        self.run = RunBuilder(store, run_id=run_id)

    def step(self, writer: RankWriter, mode: ModeKeys, mode_step: int, step: int) -> None:
        attempt, rank = writer.session.attempt, writer.session.rank
        arrays = {name: self._chance.normal(size=4).astype(np.float32) for name in ("a", "b")}
        reduced = self._chance.normal(size=4)
        number = self._chance.normal(size=())
        saved: dict[str, Any] = {"n": number, "r": Saved(reduced, False, ["max"])}
        if mode is TRAIN:
            # In two parts, so that blocks of a step lie in two manifests now and then.
            writer.step(mode, mode_step, {"a": arrays["a"]}, step=step, close=False)
            if mode_step % 3 == 2:
                writer.flush()
            saved["b"] = arrays["b"]
        writer.step(mode, mode_step, saved, step=step)
        truth = self.known.truth
        for name, value in {"n": number, **(arrays if mode is TRAIN else {})}.items():
            truth[Cell(attempt, rank, mode, mode_step, name)] = value
        truth[Cell(attempt, rank, mode, mode_step, "r", "max")] = reduced.max()

    def steps(self, writer: RankWriter, first: int, count: int) -> None:
        for number in range(first, first + count):
            mode = EVAL if number % 4 == 3 else TRAIN
            self.step(writer, mode, number, number)
            writer.flush()


def ended(store: Store, run_id: str = "run", seed: int = 0) -> Known:
    """Two ranks, started twice: first they are lost, then they end. Some have left a summary."""
    author = Author(store, run_id, seed)
    for attempt, first in ((0, 0), (1, 3)):
        for rank in range(2):
            writer = author.run.rank(rank, 2, attempt=attempt)
            writer.attach_bytes = 4096 if rank else 0
            writer.describe(CollectionInfo("weights", (f"of {run_id}",)))
            author.steps(writer, first, 5)
            writer.beat(author.run.now)
            (writer.end if attempt else writer.lose)()
            if rank == attempt:
                sync.run(Summary(writer.session).write(store, writer.seq))
    return author.known


def live(store: Store, run_id: str = "run", seed: int = 0) -> Known:
    """One rank that still writes, and has left a span."""
    author = Author(store, run_id, seed)
    writer = author.run.rank(0)
    author.steps(writer, 0, 15)
    writer.beat(author.run.now)
    Roller(writer).roll()
    return author.known


def built(make: Callable[[Store, str, int], Known], store: Store, *, merged: bool = False) -> Known:
    known, other = make(store, "run", 1), make(MemoryStore(), "other", 2)
    for one in (known, other):
        if merged:
            sync.run(merge_once(one.store))
        one.snapshot()
    known.foreign = other.objects
    known.right = read(known.store)
    assert known.right.error == ""
    assert not known.right.troubles
    return known


# -- damaging --------------------------------------------------------------------------------------


class Damage(NamedTuple):
    """`changes`: by key, what is there then; None for nothing."""

    how: str
    changes: dict[str, bytes | None]

    def __str__(self) -> str:
        return f"{self.how}: {', '.join(self.changes)}"


def damage(known: Known, chance: random.Random) -> Damage:
    kinds = sorted({_kind(key) for key in known.objects})
    kind = chance.choice(kinds)
    ours = [key for key in sorted(known.objects) if _kind(key) == kind]
    key = chance.choice(ours)
    other = chance.choice(ours if chance.random() < 0.8 else sorted(known.objects))
    data, theirs = known.objects[key], known.objects[other]
    how = chance.choice(_WAYS)
    if how == "flip":
        return Damage(how, {key: _flipped(data, chance)})
    if how == "cut":
        return Damage(how, {key: data[: chance.randrange(len(data) or 1)]})
    if how == "grow":
        return Damage(how, {key: data + chance.randbytes(chance.randrange(1, 9))})
    if how == "zero":
        start = chance.randrange(len(data) or 1)
        zeros = bytes(min(16, len(data) - start))
        return Damage(how, {key: data[:start] + zeros + data[start + 16 :]})
    if how == "delete":
        return Damage(how, {key: None})
    if how == "delete folder":
        folder = key.rpartition("/")[0] + "/"
        gone = [k for k in known.objects if k.startswith(folder)] or [key]
        return Damage(how, dict.fromkeys(gone))
    if how == "swap":
        return Damage(how, {key: theirs, other: data})
    if how == "copy":
        return Damage(how, {key: theirs})
    if how == "rename":
        return Damage(how, {_renamed(key, chance): data, key: None})
    foreign = [k for k in sorted(known.foreign) if _kind(k) == kind] or sorted(known.foreign)
    stranger = key if key in known.foreign and chance.random() < 0.7 else chance.choice(foreign)
    at = chance.choice([key, stranger])
    return Damage("foreign", {at: known.foreign[stranger]})


_WAYS = (
    "flip", "flip", "flip", "cut", "grow", "zero", "delete", "delete folder", "swap", "swap", "copy",
    "rename", "foreign", "foreign",
)  # fmt: skip


def _kind(key: str) -> str:
    parts = key.split("/")
    return "/".join(parts[:2]) if parts[0] == "merged" else parts[0]


def _flipped(data: bytes, chance: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _renamed(key: str, chance: random.Random) -> str:
    """Another key of its kind, mostly: one of its digits is another one."""
    digits = [at for at, letter in enumerate(key) if letter.isdigit()]
    if not digits:
        return f"{key}.old"
    at = chance.choice(digits[-12:])
    return key[:at] + chance.choice("0123456789") + key[at + 1 :]


@contextlib.contextmanager
def damaged(known: Known, change: Damage) -> Iterator[None]:
    def put(key: str, data: bytes | None) -> None:
        work = known.store.delete(key) if data is None else known.store.put(key, [data])
        sync.run(work)

    for key, data in change.changes.items():
        put(key, data)
    try:
        yield
    finally:
        for key in change.changes:
            put(key, known.objects.get(key))


# -- reading ---------------------------------------------------------------------------------------


@dataclass
class Reading:
    """All that a trial says; `cells` with the attempt that it shows."""

    cells: dict[Cell, Any] = field(default_factory=dict)
    complete: set[tuple[ModeKeys, int]] = field(default_factory=set)
    said: list[str] = field(default_factory=list)  # errors
    troubles: list[str] = field(default_factory=list)
    error: str = ""  # that it cannot be opened

    def names(self, key: str) -> bool:
        return any(key in text for text in (*self.said, *self.troubles, self.error))


def read(store: Store) -> Reading:
    found = Reading()
    try:
        trial = create_trial(store.url)
    except SmdistError as error:
        found.error = str(error)
        return found
    try:
        trial.dynamic_refresh = False
        _read_all(trial, found)
    finally:
        trial.close()
    return found


def _read_all(trial: Trial, found: Reading) -> None:
    for mode in trial.modes():
        with contextlib.suppress(SmdistError):
            trial.values(mode=mode)  # what can be had together is in the cache then
        complete = trial.steps(mode)
        for step in trial.steps(mode, show_incomplete_steps=True):
            _read_step(trial, mode, step, found)
            missing = trial.missing(step, mode)
            if step in complete and not missing:  # also after its values were read
                found.complete.add((mode, step))
            found.said += [f"{step}: {rank} {why}" for rank, why in missing.items()]
    trial.describe(), trial.collections(), trial.thinned(), trial.dropped(), trial.attempts()
    found.troubles = [text for texts in trial.troubles().values() for text in texts]


def _read_step(trial: Trial, mode: ModeKeys, step: int, found: Reading) -> None:
    facts = trial.catalogue.step(step, mode)
    assert facts is not None
    try:
        names = trial.tensor_names(step=step, mode=mode)
    except SmdistError as error:
        found.said.append(str(error))
        return
    for name in names:
        for rank in facts.ranks:
            cell = Cell(facts.attempt, rank, mode, step, name, "max" if name == "r" else "raw")
            try:
                tensor, who = trial.tensor(name), f"worker_{rank}"
                if name == "r":
                    found.cells[cell] = tensor.reduction_value(step, "max", mode, who)
                else:
                    found.cells[cell] = tensor.value(step, mode, who)
            except SmdistError as error:
                found.said.append(str(error))


# -- judging ---------------------------------------------------------------------------------------


def judge(known: Known, change: Damage, found: Reading) -> None:
    """No value is wrong; what became unreadable is named."""
    right = known.right
    assert right is not None
    for cell, value in found.cells.items():
        truth = known.truth.get(cell)
        assert truth is not None, f"{change}: {cell} was never written"
        assert np.array_equal(value, truth), f"{change}: {cell} is wrong"
    for mode, step in found.complete:
        cells = {c for c in right.cells if (c.mode, c.step) == (mode, step)}
        assert cells <= found.cells.keys(), f"{change}: step {step} of {mode} is not complete"
    less = right.cells.keys() - found.cells.keys() or right.complete - found.complete
    if less and not _unnoticeable(known, change):
        told = (found.error, found.said, found.troubles)
        assert any(map(found.names, change.changes)), f"{change} is not named: {told}"


def _unnoticeable(known: Known, change: Damage) -> bool:
    """The last manifest of a session that left no summary and is in no snapshot: as if never put."""
    gone = [key for key, data in change.changes.items() if data is None]
    for key in gone:
        folder, _, name = key.rpartition("/")
        attempt = f"{folder}/{name[:7]}"
        later = [k for k in known.objects if k.startswith(attempt) and k > key and k not in gone]
        summary = f"{attempt[:-1].replace('manifests/', 'summaries/')}.json"
        if key.startswith("manifests/") and not later and summary not in known.objects:
            return True
    return False
