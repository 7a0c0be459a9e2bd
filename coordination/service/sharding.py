"""Poll thousands of ranks with several processes: each reads a share of the ranks, one merges.

The number of requests limits how many ranks one process can follow. A `Shard` reads the ranks whose
number modulo the number of shards is its index. `ShardedPoller`, in the coordinator's process, asks all
shards at once and hands on the facts that they found. Applying facts is commutative, associative and
idempotent, so the view does not depend on which shard read them, or how often.

A shard does nothing on its own and keeps nothing that matters. One call:

    coordinator  PollRequest    a growing number, and hints of uploaders
    shard        PollResponse   the facts that are new since the last call, and the shard's state

Asked again with the same number, a shard repeats its answer: the first one was lost. A shard that does
not know the client (one of them was restarted) answers `unknown_client`; the coordinator then sends how
far each rank was read (`PollRequest.cursors`). Requests and responses are MessagePack; the transport is
not known here.

Ray may execute a call again, and late, even in a shard that was restarted. So a smaller number changes
nothing. The state of a shard for one client has an id (`state_id`), which the coordinator repeats: facts
that another state has handed out are not counted as delivered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

import msgspec

from smdist.coordination.service.poll_schedule import (
    LIVE,
    PollIntervals,
    RankTrack,
    WatchPolicy,
)
from smdist.coordination.service.store_poller import PollCounts, StorePoller
from smdist.coordination.view.membership import LastContact
from smdist.coordination.view.run_view import Fact, View
from smdist.format.layout import Layout
from smdist.format.manifest import Heartbeat, Owner, RankManifest, Session
from smdist.storage.store import Store
from smdist.storage.subtree import StoreSubtree

__all__ = ["Call", "PollRequest", "PollResponse", "Shard", "ShardedPoller"]

Call = Callable[[bytes], Awaitable[bytes]]
"""Send an encoded `PollRequest` to one shard and return its encoded response."""

_TIMEOUT_S = 15.0  # for a shard's answer: the coordinator has to renew its lease between polls


class RankCursor(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank was read: the part of a RankTrack that another process needs to continue."""

    attempt: int
    rank: int
    seq: int
    final: bool
    written_at: float
    heartbeat_at: float
    reported_at: float
    lost: bool = False
    session: str = ""

    @staticmethod
    def of(track: RankTrack) -> RankCursor:
        return RankCursor(*(getattr(track, name) for name in RankCursor.__struct_fields__))

    def track(self, now: float) -> RankTrack:
        return RankTrack(**msgspec.structs.asdict(self), read_at=now)


class PollRequest(msgspec.Struct, frozen=True, array_like=True):
    """One poll of a run. `cursors` only where the shard does not know the client."""

    run: str  # its name below the watched directory
    client_id: str
    number: int
    hints: tuple[tuple[str, int, int], ...] = ()
    wanted: tuple[str, ...] = ()  # layouts
    intervals: tuple[float, ...] = ()
    cursors: Optional[tuple[RankCursor, ...]] = None  # noqa: UP045 (3.10)
    state_id: str = ""  # of the last response


class PollResponse(msgspec.Struct, frozen=True, array_like=True):
    """What one poll found. `unknown_client`: nothing was read; send cursors."""

    number: int
    unknown_client: bool = False
    sessions: tuple[Session, ...] = ()
    manifests: tuple[RankManifest, ...] = ()
    heartbeats: tuple[Heartbeat, ...] = ()
    layouts: dict[str, Layout] = {}
    troubles: dict[str, str] = {}
    is_complete: bool = False
    is_failing: bool = False
    next_due: float = 0.0
    state_id: str = ""


_REQUESTS = msgspec.msgpack.Decoder(PollRequest)
_RESPONSES = msgspec.msgpack.Decoder(PollResponse)


# -- in the shard's process ----------------------------------------------------------------------


@dataclass
class _ClientState:
    """What a shard keeps for one run and one client."""

    client_id: str
    poller: StorePoller
    state_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    facts: list[Fact] = field(default_factory=list)
    sent_layouts: set[str] = field(default_factory=set)
    number: int = -1
    answer: bytes = b""


class Shard:
    """Reads the ranks `index`, `index + of`, ... of any run in a store, which it does not close."""

    def __init__(
        self, index: int, of: int, store: Store, now: Callable[[], float] = time.time
    ) -> None:
        self._share, self._store, self._now = (index, of), store, now
        self._states: dict[str, _ClientState] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def poll(self, data: bytes) -> bytes:
        """Answer an encoded PollRequest."""
        request = _REQUESTS.decode(data)
        async with self._locks.setdefault(request.run, asyncio.Lock()):
            state = self._states.get(request.run)
            if state is not None and state.client_id == request.client_id:
                if request.number == state.number:
                    return state.answer
                if request.number < state.number:
                    late = PollResponse(request.number, state_id=state.state_id)
                    return msgspec.msgpack.encode(late)
            if request.cursors is not None:
                state = self._new_state(request, request.cursors)
            elif state is None or (state.client_id, state.state_id) != (
                request.client_id,
                request.state_id,
            ):
                return msgspec.msgpack.encode(PollResponse(request.number, unknown_client=True))
            state.answer = await self._poll(state, request)
            state.number = request.number
            self._states[request.run] = state
            return state.answer

    def _new_state(self, request: PollRequest, cursors: Iterable[RankCursor]) -> _ClientState:
        store = StoreSubtree(self._store, request.run) if request.run else self._store
        facts: list[Fact] = []
        intervals = PollIntervals(*request.intervals)
        poller = StorePoller(store, facts.append, self._now, intervals, shard=self._share)
        for cursor in cursors:
            poller.tracks[cursor.attempt, cursor.rank] = cursor.track(self._now())
        return _ClientState(request.client_id, poller, facts=facts)

    async def _poll(self, state: _ClientState, request: PollRequest) -> bytes:
        poller, facts = state.poller, state.facts
        poller.want_layouts(request.wanted)
        for hint in request.hints:
            poller.hint(*hint)
        await poller.poll()
        layouts = {key: one for key, one in poller.layouts.items() if key not in state.sent_layouts}
        response = PollResponse(
            request.number,
            False,
            tuple(fact for fact in facts if isinstance(fact, Session)),
            tuple(fact for fact in facts if isinstance(fact, RankManifest)),
            tuple(fact for fact in facts if isinstance(fact, Heartbeat)),
            layouts,
            dict(poller.troubles),
            poller.is_complete,
            poller.is_failing,
            poller.next_due(),
            state.state_id,
        )
        answer = msgspec.msgpack.encode(response)
        state.sent_layouts.update(layouts)
        facts.clear()
        return answer


# -- in the coordinator's process ----------------------------------------------------------------


@dataclass
class _ShardClient:
    """What the coordinator knows of a shard."""

    index: int
    call: Call
    number: int = 0
    hints: list[tuple[str, int, int]] = field(default_factory=list)
    last: PollResponse = field(default_factory=lambda: PollResponse(-1))
    trouble: str = ""


class ShardedPoller:
    """A RunPoller whose polls are done by shards.

    It mirrors their tracks, for shards that are restarted. `check_for_more` is done here: it is for
    a run that has ended, which no shard polls.
    """

    def __init__(
        self,
        store: Store,
        on_fact: Callable[[Fact], None],
        now: Callable[[], float],
        intervals: PollIntervals,
        policy: WatchPolicy = LIVE,
        *,
        run: str,
        calls: Sequence[Call],
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._local = StorePoller(store, on_fact, now, intervals, policy)
        self.layouts, self.tracks = self._local.layouts, self._local.tracks
        self.hints = 0
        self._on_fact, self._now, self._intervals = on_fact, now, intervals
        self._run, self._timeout_s = run, timeout_s
        self._client_id = uuid.uuid4().hex
        self._shards = [_ShardClient(index, call) for index, call in enumerate(calls)]

    @property
    def troubles(self) -> Mapping[str, str]:
        found = dict(self._local.troubles)
        for shard in self._shards:
            found |= shard.last.troubles
            if shard.trouble:
                found[f"shard {shard.index}"] = shard.trouble
        return found

    @property
    def is_complete(self) -> bool:
        return bool(self.tracks) and all(shard.last.is_complete for shard in self._shards)

    @property
    def is_failing(self) -> bool:
        return any(shard.last.is_failing or shard.trouble for shard in self._shards)

    @property
    def quiet_s(self) -> float:
        return self._local.quiet_s

    def resume_from(
        self,
        view: View,
        layouts: Mapping[str, Layout],
        named: Iterable[str],
        reread: frozenset[int] = frozenset(),
    ) -> None:
        self._local.resume_from(view, layouts, named, reread)

    def last_contacts(self) -> dict[Owner, LastContact]:
        return self._local.last_contacts()

    def next_due(self) -> float:
        return min(shard.last.next_due for shard in self._shards)

    def hint(self, worker: str, attempt: int, seq: int) -> None:
        """Pass a hint to the shard of its rank with the next poll."""
        number = worker.rpartition("_")[2]
        if number.isdecimal():
            self.hints += 1
            shard = self._shards[int(number) % len(self._shards)]
            shard.hints.append((worker, attempt, seq))
            shard.last = msgspec.structs.replace(shard.last, next_due=0.0)

    async def check_for_more(self) -> PollCounts:
        return await self._local.check_for_more()

    async def poll(self) -> PollCounts:
        """Have all shards poll and hand on what they found."""
        counts = PollCounts()
        answers = await asyncio.gather(*(self._ask(shard) for shard in self._shards))
        for shard, response in zip(self._shards, answers, strict=True):
            if response is not None:
                shard.last = response
                self._accept(response, counts)
        return counts

    async def _ask(self, shard: _ShardClient) -> PollResponse | None:
        """Return the answer of a shard. None if it failed: the next poll repeats the number."""
        hints = tuple(shard.hints)
        # The first shard reads the layouts that a snapshot names and that are not known.
        wanted = tuple(self._local.wanted) if shard.index == 0 else ()
        request = PollRequest(
            self._run,
            self._client_id,
            shard.number + 1,
            hints,
            wanted,
            state_id=shard.last.state_id,
        )
        try:
            response = await self._call(shard, request)
            if response.unknown_client:
                intervals = tuple(map(float, dataclasses.astuple(self._intervals)))
                cursors = self._cursors(shard.index)
                request = msgspec.structs.replace(request, intervals=intervals, cursors=cursors)
                response = await self._call(shard, request)
        except Exception as error:  # noqa: BLE001 - the other shards must go on
            shard.trouble = f"shard {shard.index} does not answer: {error!r}"
            return None
        shard.trouble = ""
        shard.number = request.number
        del shard.hints[: len(hints)]
        return response

    async def _call(self, shard: _ShardClient, request: PollRequest) -> PollResponse:
        answer = asyncio.wait_for(shard.call(msgspec.msgpack.encode(request)), self._timeout_s)
        return _RESPONSES.decode(await answer)

    def _cursors(self, index: int) -> tuple[RankCursor, ...]:
        count = len(self._shards)
        return tuple(RankCursor.of(t) for t in self.tracks.values() if t.rank % count == index)

    def _accept(self, response: PollResponse, counts: PollCounts) -> None:
        now = self._now()
        for session in response.sessions:
            self._on_fact(session)
            owner = (session.attempt, session.rank)
            track = RankTrack(*owner, read_at=now, reported_at=session.started)
            self.tracks.setdefault(owner, track).session = session.session
        for manifest in response.manifests:
            self._on_fact(manifest)
            self._track(manifest).accept(manifest, now)
        for heartbeat in response.heartbeats:
            self._on_fact(heartbeat)
            track = self._track(heartbeat)
            if heartbeat.time > track.heartbeat_at:
                track.heartbeat_at, track.alive_at = heartbeat.time, now
            track.reported_at = max(track.reported_at, heartbeat.time)
        new = {key: one for key, one in response.layouts.items() if key not in self.layouts}
        self.layouts.update(new)
        for digest in new:
            self._local.wanted.pop(digest, None)
        counts.sessions += len(response.sessions)
        counts.manifests += len(response.manifests)
        counts.heartbeats += len(response.heartbeats)
        counts.layouts += len(new)

    def _track(self, fact: RankManifest | Heartbeat) -> RankTrack:
        owner = (fact.attempt, fact.rank)
        return self.tracks.setdefault(owner, RankTrack(*owner))
