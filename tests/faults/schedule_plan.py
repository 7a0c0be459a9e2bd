"""What happens in one schedule, drawn from a seed. Pure: a plan is data, and JSON for a human.

A plan says what the rank saves and where it dies (by the ordinal of a journal record), how its
uploaders write, and what befalls their requests: the `nth` of its sort, counted over all of them.
Nothing in it is a time to wait for. To shrink a failing one, delete from its JSON and run it again
with `schedule_driver.py`.
"""

from __future__ import annotations

import random
import zlib
from typing import Any, Literal, Union

import msgspec
import numpy as np

from smdist.workers.spool.spool import UploadOptions

__all__ = [
    "CLOSE",
    "Cut",
    "Deed",
    "Delay",
    "Event",
    "Halve",
    "Kill",
    "Lose",
    "Plan",
    "Refuse",
    "Saved",
    "draw",
    "value",
]

CLOSE = -1  # in the kinds of a step: closed here, what follows comes late
SORTS = (  # of requests, see schedule_proxy
    "manifest",
    "segment",
    "create",
    "part",
    "complete",
    "abort",
    "layout",
    "list",
    "list_uploads",
    "get",
    "delete",
    "small",
    "any",
)
_WEIGHTS = (6, 4, 4, 4, 4, 1, 2, 2, 2, 1, 1, 1, 5)


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a part. One element that is kept: a number."""

    elements: int
    raw: bool
    reduced: bool


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """SIGKILL at this request, before the server sees it or once it has acted and not answered."""

    who: Literal["uploader", "rank", "both"]
    when: Literal["before", "after"]


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    status: int
    code: str
    early: bool = False  # before the body was read


class Lose(msgspec.Struct, frozen=True, tag="lose"):
    """The connection is reset, before the server sees the request or once it has acted."""

    when: Literal["before", "after"]


class Halve(msgspec.Struct, frozen=True, tag="halve"):
    """Half of the request's body reaches the server, then both connections are gone."""


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """The answer ends after so many bytes, its head counted."""

    after_bytes: int


class Delay(msgspec.Struct, frozen=True, tag="delay"):
    seconds: float


Deed = Union[Kill, Refuse, Lose, Halve, Cut, Delay]  # noqa: UP007 (3.10)


class Event(msgspec.Struct, frozen=True):
    sort: str
    nth: int  # from 0
    deed: Deed
    times: int = 1  # this request and those of its sort that follow


class Plan(msgspec.Struct, frozen=True):
    seed: int
    number: int
    kinds: tuple[tuple[Saved, ...], ...]  # of parts
    steps: tuple[tuple[int, ...], ...]  # kinds, in order of their capture, and CLOSE
    waits: tuple[int, ...] = ()  # after so many captures the rank waits until all is acknowledged
    ends: Literal["drain", "end", "error", "exit"] = "drain"
    dies_at: int = -1  # ordinal of a journal record
    dies: Literal["before", "torn", "after"] = "after"
    upload: UploadOptions = UploadOptions()
    journal_bytes: int = 64 << 10
    buffer_bytes: int = 1 << 20
    multipart_bytes: int = 16 << 20
    part_bytes: int = 8 << 20
    deadline_s: float = 10.0  # of an operation of the store; 0: what fails is not retried there
    events: tuple[Event, ...] = ()

    def name(self, kind: int, index: int) -> str:
        saved = self.kinds[kind][index]
        return f"{'scalar/' if saved.elements == 1 else ''}k{kind}.{index}"


def value(plan: Plan, step: int, kind: int, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The content of a tensor follows from where it is."""
    place = zlib.crc32(f"{plan.seed} {plan.number} {step} {kind} {index}".encode())
    shape = () if (elements := plan.kinds[kind][index].elements) == 1 else (elements,)
    drawn = np.random.Generator(np.random.PCG64(place)).standard_normal(shape, dtype=np.float32)
    return np.asarray(drawn, dtype=np.float32)


# -- chance ----------------------------------------------------------------------------------------


def draw(seed: int, number: int) -> Plan:
    chance = random.Random(f"{seed} {number}")
    kinds = tuple(_kind(chance) for _ in range(chance.randint(1, 4)))
    # One in ten is long, and stores each part by itself: long enough for spans of manifests.
    is_long = number % 10 == 0
    count = chance.randint(17, 36) if is_long else chance.randint(1, 8)
    steps = tuple(_step(chance, len(kinds)) for _ in range(count))
    captures = sum(kind != CLOSE for step in steps for kind in step)
    waits = captures if is_long else min(captures, _few(chance, 3))
    step_bytes = sum(4 * saved.elements + 200 for kind in kinds for saved in kind)
    gives_up = chance.random() < 0.06
    return Plan(
        seed=seed,
        number=number,
        kinds=kinds,
        steps=steps,
        waits=tuple(sorted(chance.sample(range(1, captures + 1), waits))),
        ends=chance.choice(("drain", "drain", "end", "error", "exit")),
        dies_at=chance.randrange(3 * captures + 3) if chance.random() < 0.5 else -1,
        dies=chance.choice(("before", "torn", "after")),
        upload=_options(chance, gives_up),
        journal_bytes=chance.choice((1 << 10, 4 << 10, 64 << 10)),
        buffer_bytes=max(64 << 10, chance.choice((2, 8)) * step_bytes),
        multipart_bytes=chance.choice((2 << 10, 8 << 10, 32 << 10, 16 << 20)),
        part_bytes=chance.choice((4 << 10, 16 << 10, 64 << 10)),
        deadline_s=0.0 if gives_up else chance.choice((0.0, 0.0, 0.2, 10.0)),
        events=_events(chance, gives_up),
    )


def _few(chance: random.Random, most: int) -> int:
    return min(chance.randint(0, most), chance.randint(0, most))


def _kind(chance: random.Random) -> tuple[Saved, ...]:
    return tuple(_saved(chance) for _ in range(chance.randint(1, 3)))


def _saved(chance: random.Random) -> Saved:
    what = chance.random()
    if what < 0.3:
        return Saved(1, raw=True, reduced=False)
    elements = int(2 ** chance.uniform(1, 14))
    reduced = what > 0.6
    return Saved(max(elements, 2), raw=not reduced or what > 0.85, reduced=reduced)


def _step(chance: random.Random, kinds: int) -> tuple[int, ...]:
    saved = chance.sample(range(kinds), chance.randint(1, kinds))
    if chance.random() < 0.5:
        saved.insert(chance.randint(1, len(saved)), CLOSE)
    return tuple(saved)


def _options(chance: random.Random, gives_up: bool) -> UploadOptions:
    return UploadOptions(
        linger_s=chance.choice((0.0, 0.002, 0.02)),
        segment_bytes=chance.choice((1 << 10, 16 << 10, 64 << 10, 1 << 20)),
        heartbeat_s=chance.choice((0.02, 5.0, 5.0)),
        drain_deadline_s=0.2 if gives_up else 60.0,
        nice=0,
        attach_bytes=chance.choice((0, 4 << 10, 256 << 10)),
    )


def _events(chance: random.Random, gives_up: bool) -> tuple[Event, ...]:
    events = [_event(chance, _kill(chance)) for _ in range(chance.randint(0, 3))]
    events += [_event(chance, _fault(chance)) for _ in range(chance.randint(0, 6))]
    if gives_up:
        events.append(Event("any", chance.randrange(2, 20), Refuse(503, "SlowDown"), times=20))
    chance.shuffle(events)
    return tuple(events)


def _event(chance: random.Random, deed: Deed) -> Event:
    sort = chance.choices(SORTS, _WEIGHTS)[0]
    nth = chance.randrange(30) if sort == "any" else min(chance.randrange(6), chance.randrange(6))
    once = isinstance(deed, Kill) or chance.random() < 0.6
    return Event(sort, nth, deed, 1 if once else chance.randint(2, 4))


def _kill(chance: random.Random) -> Kill:
    who = chance.choice(("uploader", "uploader", "uploader", "rank", "both"))
    return Kill(who, chance.choice(("before", "after", "after")))  # type: ignore[arg-type]


def _fault(chance: random.Random) -> Deed:
    refusals = ((500, "InternalError"), (503, "SlowDown"), (503, "ServiceUnavailable"))
    status, code = chance.choice(refusals)
    deeds: tuple[Deed, ...] = (
        Refuse(status, code, early=chance.random() < 0.3),
        Lose("before"),
        Lose("after"),
        Lose("after"),
        Halve(),
        Cut(chance.randrange(600)),
        Delay(chance.choice((0.002, 0.02, 0.05))),
    )
    return chance.choice(deeds)
