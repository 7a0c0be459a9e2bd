"""Following thousands of ranks with several processes: each reads a share, the root merges.

What a request costs a process, not what is in it, limits how many ranks one can follow. So a
`Shard` follows the ranks whose number is its own modulo how many shards there are, and
`ShardedPoller`, in the root's process, is to a watcher what `StorePoller` is: `poll` asks all shards at
once and takes the facts they found. Folding facts is commutative, associative and idempotent, so
the view is the same whoever read what, also twice.

A shard does nothing of its own accord and keeps nothing that matters. One call:

    root   poll(PollRequest)    a number that grows, what uploaders have hinted at
    shard  PollResponse           the facts that are new since the last call, and how it stands

PollRequest again under the same number, it tells the same again: the answer was lost. A shard that does
not know the root (`life`), because one of them was restarted, answers that it is to be told first
how far each rank was read: `PollRequest.tracks`. Both are MessagePack; how they travel is not seen here.

A call may be executed again, and late, even by a shard that was restarted since; the answer goes
nowhere. So a number that was passed changes nothing, and what a shard has begun has a name
(`share`), which the root repeats: facts that another beginning has told were told to nobody.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Optional

import msgspec

from smdist.coordination.service.store_poller import (
    PollCounts,
    PollIntervals,
    RankTrack,
    StorePoller,
)
from smdist.coordination.view.run_view import Fact
from smdist.format.layout import Layout
from smdist.format.manifest import Heartbeat, RankManifest, Session
from smdist.storage.store import Store
from smdist.storage.subtree import StoreSubtree

__all__ = ["Call", "PollRequest", "PollResponse", "Shard", "ShardedPoller"]

Call = Callable[[bytes], Awaitable[bytes]]
"""Hand an encoded `PollRequest` to one shard, and give what it answers."""

_PATIENCE_S = 15.0  # with a shard, in one turn of the root: its lease has to be renewed


class RankCursor(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank was read, of a RankTrack what another process can go on from."""

    attempt: int
    rank: int
    seq: int
    final: bool
    written_at: float
    beaten_at: float
    seen_at: float
    lost: bool = False
    session: str = ""


class PollRequest(msgspec.Struct, frozen=True, array_like=True):
    run: str  # its name below the watched place
    life: str  # of the root's follower
    number: int
    hints: tuple[tuple[str, int, int], ...] = ()
    wanted: tuple[str, ...] = ()  # layouts
    rhythm: tuple[float, ...] = ()
    tracks: Optional[tuple[RankCursor, ...]] = None  # noqa: UP045 (3.10)
    share: str = ""  # as it was told the last time


class PollResponse(msgspec.Struct, frozen=True, array_like=True):
    """`stranger`: it does not know this life, and has looked at nothing."""

    number: int
    stranger: bool = False
    sessions: tuple[Session, ...] = ()
    manifests: tuple[RankManifest, ...] = ()
    beats: tuple[Heartbeat, ...] = ()
    layouts: dict[str, Layout] = {}
    troubles: dict[str, str] = {}
    settled: bool = False
    failing: bool = False
    next_due: float = 0.0
    share: str = ""


_ASKED = msgspec.msgpack.Decoder(PollRequest)
_TOLD = msgspec.msgpack.Decoder(PollResponse)


# -- a share -------------------------------------------------------------------------------------


@dataclass
class _Share:
    """One run, for one life of its root."""

    life: str
    follow: StorePoller
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    facts: list[Fact] = field(default_factory=list)
    known: set[str] = field(default_factory=set)  # layouts that were told
    number: int = -1
    answer: bytes = b""


class Shard:
    """The ranks `index`, `index + of`, ... of any run in a store, which stays its owner's."""

    def __init__(
        self, index: int, of: int, store: Store, now: Callable[[], float] = time.time
    ) -> None:
        self._share, self._store, self._now = (index, of), store, now
        self._shares: dict[str, _Share] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def poll(self, data: bytes) -> bytes:
        asked = _ASKED.decode(data)
        async with self._locks.setdefault(asked.run, asyncio.Lock()):
            share = self._shares.get(asked.run)
            if share is not None and share.life == asked.life and asked.number <= share.number:
                if asked.number == share.number:
                    return share.answer
                return msgspec.msgpack.encode(PollResponse(asked.number, share=share.name))
            if asked.tracks is not None:
                share = self._begin(asked, asked.tracks)
            elif share is None or (share.life, share.name) != (asked.life, asked.share):
                return msgspec.msgpack.encode(PollResponse(asked.number, stranger=True))
            share.answer = await self._look(share, asked)
            share.number = asked.number
            self._shares[asked.run] = share
            return share.answer

    def _begin(self, asked: PollRequest, tracks: Iterable[RankCursor]) -> _Share:
        store = StoreSubtree(self._store, asked.run) if asked.run else self._store
        facts: list[Fact] = []
        follow = StorePoller(
            store, facts.append, self._now, PollIntervals(*asked.rhythm), share=self._share
        )
        now = self._now()
        for at in tracks:
            follow.tracks[at.attempt, at.rank] = RankTrack(
                at.attempt,
                at.rank,
                at.seq,
                at.final,
                written_at=at.written_at,
                heard_at=now,
                beaten_at=at.beaten_at,
                seen_at=at.seen_at,
                lost=at.lost,
                session=at.session,
            )
        return _Share(asked.life, follow, facts=facts)

    async def _look(self, share: _Share, asked: PollRequest) -> bytes:
        follow, facts = share.follow, share.facts
        follow.want(asked.wanted)
        for hint in asked.hints:
            follow.hint(*hint)
        await follow.poll()
        layouts = {key: one for key, one in follow.layouts.items() if key not in share.known}
        told = PollResponse(
            asked.number,
            False,
            tuple(fact for fact in facts if isinstance(fact, Session)),
            tuple(fact for fact in facts if isinstance(fact, RankManifest)),
            tuple(fact for fact in facts if isinstance(fact, Heartbeat)),
            layouts,
            dict(follow.troubles),
            follow.settled,
            follow.failing,
            follow.next_due(),
            share.name,
        )
        answer = msgspec.msgpack.encode(told)
        share.known.update(layouts)
        facts.clear()
        return answer


# -- the root ------------------------------------------------------------------------------------


@dataclass
class _ShardClient:
    """What the root knows of a shard."""

    call: Call
    number: int = 0
    hints: list[tuple[str, int, int]] = field(default_factory=list)
    told: PollResponse = field(default_factory=lambda: PollResponse(-1))
    trouble: str = ""


class ShardedPoller(StorePoller):
    """A StorePoller whose `poll` has others ask. Its own tracks mirror theirs, for who is restarted.

    `look_again` is still its own: it is used for a run that has ended, which is not followed.
    """

    def __init__(
        self,
        store: Store,
        take: Callable[[Fact], None],
        now: Callable[[], float],
        rhythm: PollIntervals,
        *,
        run: str,
        calls: Sequence[Call],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        super().__init__(store, take, now, rhythm)
        self._asking, self._patience_s = run, patience_s
        self._life = uuid.uuid4().hex
        self._seats = [_ShardClient(call) for call in calls]

    @property
    def settled(self) -> bool:
        return bool(self.tracks) and all(seat.told.settled for seat in self._seats)

    @property
    def failing(self) -> bool:
        return any(seat.told.failing or seat.trouble for seat in self._seats)

    def next_due(self) -> float:
        return min(seat.told.next_due for seat in self._seats)

    def hint(self, worker: str, attempt: int, seq: int) -> None:
        number = worker.rpartition("_")[2]
        if number.isdecimal():
            self.hints += 1
            seat = self._seats[int(number) % len(self._seats)]
            seat.hints.append((worker, attempt, seq))
            seat.told = msgspec.structs.replace(seat.told, next_due=0.0)

    async def poll(self) -> PollCounts:
        found = PollCounts()
        answers = await asyncio.gather(*(self._ask(seat) for seat in self._seats))
        for seat, told in zip(self._seats, answers, strict=True):
            if told is not None:
                seat.told = told
                self._fold(told, found)
        self.troubles = {
            key: text for seat in self._seats for key, text in seat.told.troubles.items()
        }
        for index, seat in enumerate(self._seats):
            if seat.trouble:
                self.troubles[f"shard {index}"] = seat.trouble
        return found

    async def _ask(self, seat: _ShardClient) -> PollResponse | None:
        """None when nothing came of it: the same number is asked for again the next time."""
        hints = tuple(seat.hints)
        # Of the layouts that a snapshot names and nobody has read, the first seat takes care.
        wanted = tuple(self._wanted) if seat is self._seats[0] else ()
        asked = PollRequest(
            self._asking, self._life, seat.number + 1, hints, wanted, share=seat.told.share
        )
        try:
            told = await self._call(seat, asked)
            if told.stranger:
                rhythm = tuple(
                    float(getattr(self.rhythm, name)) for name in PollIntervals.__dataclass_fields__
                )
                known = msgspec.structs.replace(
                    asked, rhythm=rhythm, tracks=self._bearings(self._seats.index(seat))
                )
                told = await self._call(seat, known)
        except Exception as error:  # noqa: BLE001 - whatever happened to it, others go on
            seat.trouble = f"shard {self._seats.index(seat)} does not answer: {error!r}"
            return None
        seat.trouble = ""
        seat.number = asked.number
        del seat.hints[: len(hints)]
        return told

    async def _call(self, seat: _ShardClient, asked: PollRequest) -> PollResponse:
        answer = asyncio.wait_for(seat.call(msgspec.msgpack.encode(asked)), self._patience_s)
        return _TOLD.decode(await answer)

    def _bearings(self, index: int) -> tuple[RankCursor, ...]:
        return tuple(
            RankCursor(
                track.attempt,
                track.rank,
                track.seq,
                track.final,
                track.written_at,
                track.beaten_at,
                track.seen_at,
                track.lost,
                track.session,
            )
            for track in self.tracks.values()
            if track.rank % len(self._seats) == index
        )

    def _fold(self, told: PollResponse, found: PollCounts) -> None:
        now = self.now()
        for session in told.sessions:
            self.take(session)
            owner = (session.attempt, session.rank)
            track = RankTrack(*owner, heard_at=now, seen_at=session.started)
            self.tracks.setdefault(owner, track).session = session.session
        for manifest in told.manifests:
            self.take(manifest)
            owner = (manifest.attempt, manifest.rank)
            self.tracks.setdefault(owner, RankTrack(*owner)).took(manifest, now)
        for beat in told.beats:
            self.take(beat)
            track = self.tracks.setdefault(
                (beat.attempt, beat.rank), RankTrack(beat.attempt, beat.rank)
            )
            if beat.time > track.beaten_at:
                track.beaten_at, track.alive_at = beat.time, now
            track.seen_at = max(track.seen_at, beat.time)
        fresh = {key: one for key, one in told.layouts.items() if key not in self.layouts}
        self.layouts.update(fresh)
        for digest in fresh:
            self._wanted.pop(digest, None)
        found.sessions += len(told.sessions)
        found.manifests += len(told.manifests)
        found.beats += len(told.beats)
        found.layouts += len(fresh)
