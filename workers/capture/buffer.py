"""The bounded memory between training and upload: arenas, and which of their ranges are in use.

Called by `Capture` under its lock. An allocated range is held with the ordinal of the journal record
that names it. It is free again once the uploader has acknowledged that ordinal.

Which ranges are in use is kept in one dict, the only source of truth. An entry is made before its
range is written to, and is changed by one assignment. The free lists, and the order in which ranges
become free, follow from it: `repair` computes both again after an interruption.

Journal bytes that are not acknowledged count too, since small values travel in the journal. A margin
above the limit is reserved for journal records, so that drops can be recorded when the buffer is full.

Small sequential captures (gradients) share one *region*. It is allocated once, filled from front to
back, and released as a whole when its last journal record is acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from typing import NamedTuple

from smdist.errors import SpoolUnavailable
from smdist.workers.capture.arena import Arena, arena_name, round_up
from smdist.workers.spool.spool import Spool, no_room

__all__ = ["ArenaRange", "BumpRegion", "CaptureBuffer"]

REGION_BYTES = 8 << 20
_REGION_SHARE = 16  # a region takes at most this fraction of the buffer
_MARGIN_SHARE, _MIN_MARGIN = 8, 64 << 10
_NO_RECORD = 1 << 62  # instead of an ordinal: no record names the range yet
_ARENA_SHIFT = 56  # a key is the arena number above this bit, the offset below
_OFFSET_MASK = (1 << _ARENA_SHIFT) - 1


class ArenaRange(NamedTuple):
    arena: int
    offset: int
    nbytes: int
    address: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def key(self) -> int:
        return self.arena << _ARENA_SHIFT | self.offset


class BumpRegion:
    """The open region: the next part is written at offset `at` of the arena at `address`."""

    __slots__ = ("address", "arena", "at", "end", "start")

    def __init__(self) -> None:
        self.arena = self.address = self.start = self.at = self.end = 0


class CaptureBuffer:
    def __init__(self, spool: Spool, limit_bytes: int, warn: Callable[[str], None]) -> None:
        self.limit_bytes = limit_bytes
        self._spool, self._warn = spool, warn
        self._arenas = [Arena(spool.path / arena_name(0), limit_bytes)]
        self._overflow_failed = False  # reported
        self._full: set[int] = set()  # arenas whose file system has no room left
        # Plain tuples of numbers, which the garbage collector does not track. Thousands of tracked
        # objects would make it scan all objects of the training script again and again.
        self._in_use: dict[int, tuple[int, int]] = {}  # arena and offset -> bytes, ordinal
        self._held: deque[tuple[int, int]] = deque()  # ordinal and key, oldest first
        self._marks: deque[tuple[int, int]] = deque()  # ordinal, journal bytes before it
        self._stored = self._allowed = 0  # journal bytes: acknowledged; allowed
        self.margin_bytes = max(limit_bytes // _MARGIN_SHARE, _MIN_MARGIN)
        self.region = BumpRegion()
        self._region_bytes = round_up(min(REGION_BYTES, limit_bytes // _REGION_SHARE))

    @property
    def used_bytes(self) -> int:
        return sum(arena.used for arena in self._arenas)

    @property
    def spare_bytes(self) -> int:
        return sum(arena.spare for arena in self._arenas)

    def allocate(self, nbytes: int) -> ArenaRange | None:
        """Return a range for `nbytes`, None when the limit or the file systems leave no room."""
        nbytes = nbytes or 1  # an empty part needs a key of its own, too
        if self._exceeds_limit(nbytes):
            return None
        for index, arena in enumerate(self._arenas):
            try:
                offset = arena.allocate(nbytes)
            except OSError as error:
                if not no_room(error):
                    raise
                self._note_full(index)
                continue
            if offset >= 0:
                self._in_use[index << _ARENA_SHIFT | offset] = (round_up(nbytes), _NO_RECORD)
                return ArenaRange(index, offset, nbytes, arena.address + offset)
        if len(self._arenas) == 1 and self._full and self._add_overflow(nbytes):
            return self.allocate(nbytes)
        return None

    def open_region(self, nbytes: int, ordinal: int) -> bool:
        """Open a region with room for `nbytes`; return False without room.

        `ordinal` is the last journal record so far. The region uses memory that is reserved already;
        new pages are requested for `nbytes` only.
        """
        self.seal_region(ordinal)
        most = max(round_up(nbytes), self._region_bytes)
        offset, size = (
            (-1, 0) if self._exceeds_limit(most) else self._arenas[0].allocate_some(nbytes, most)
        )
        place = ArenaRange(0, offset, size, 0) if offset >= 0 else self.allocate(round_up(nbytes))
        if place is None:
            return False
        self._in_use[place.key] = (place.nbytes, _NO_RECORD)
        region = self.region
        region.arena, region.address = place.arena, self._arenas[place.arena].address
        region.start = region.at = place.offset
        region.end = place.end
        return True

    def _exceeds_limit(self, nbytes: int) -> bool:
        waiting = self.used_bytes + self._allowed - self._stored
        return waiting + nbytes > self.limit_bytes + self.margin_bytes // 2

    def allow_journal_bytes(self, need: int, written: int, ordinal: int, *, values: bool) -> int:
        """Return how many bytes the journal may grow by: at least `need`, or 0 at the limit.

        The journal has `written` bytes before record `ordinal`. Records with `values` leave half of
        the margin to records without.
        """
        self.mark_journal(written, ordinal)
        reserve = self.margin_bytes // 2
        room = self.limit_bytes + reserve - self.used_bytes - (written - self._stored)
        if room >= need:
            granted = min(max(reserve // 2, need), room)
        else:
            granted = need if not values and room + reserve >= need else 0
        self._allowed = written + granted
        return granted

    def mark_journal(self, written: int, ordinal: int) -> None:
        """Count `written` journal bytes as free once all records below `ordinal` are stored."""
        if not self._marks or self._marks[-1][1] < written:
            self._marks.append((ordinal, written))

    def seal_region(self, ordinal: int) -> None:
        """Hold the used part of the region until `ordinal` is acknowledged; free the rest."""
        region = self.region
        if region.end:
            place = ArenaRange(region.arena, region.start, region.end - region.start, 0)
            used = region.at - region.start
            if used:
                self.hold_until_ack(place._replace(nbytes=used), ordinal)
            else:
                del self._in_use[place.key]
            self._arenas[region.arena].free(region.at, region.end - region.at)
            region.start = region.at = region.end = 0

    def view(self, place: ArenaRange) -> memoryview:
        return self._arenas[place.arena].view[place.offset : place.end]

    def hold_until_ack(self, place: ArenaRange, ordinal: int) -> None:
        self._in_use[place.key] = (round_up(place.nbytes), ordinal)
        self._held.append((ordinal, place.key))

    def release(self, place: ArenaRange) -> None:
        del self._in_use[place.key]
        self._arenas[place.arena].free(place.offset, place.nbytes)

    def reclaim(self, acked: int) -> None:
        """Free the ranges that records below `acked` named."""
        held = self._held
        while held and held[0][0] < acked:
            key = held.popleft()[1]
            nbytes, _ = self._in_use.pop(key)
            self._arenas[key >> _ARENA_SHIFT].free(key & _OFFSET_MASK, nbytes)
        marks = self._marks
        while marks and marks[0][0] <= acked:
            self._stored = marks.popleft()[1]

    def repair(self, ordinal: int, awaited: Container[int]) -> None:
        """Rebuild free lists and release order from the ranges in use, after an interruption.

        A range without a known record may be named by any record up to `ordinal`, the last one: it is
        held until that is stored. Ranges in `awaited` belong to device copies that continue.
        """
        for key, (nbytes, state) in tuple(self._in_use.items()):
            if state == _NO_RECORD and key not in awaited:
                self._in_use[key] = (nbytes, ordinal)
        region = self.region
        region.start = region.at = region.end = 0
        known = sorted(
            (state, key) for key, (_, state) in self._in_use.items() if state != _NO_RECORD
        )
        self._held = deque(known)
        ranges: list[list[tuple[int, int]]] = [[] for _ in self._arenas]
        for key, (nbytes, _) in self._in_use.items():
            ranges[key >> _ARENA_SHIFT].append((key & _OFFSET_MASK, nbytes))
        for arena, in_use in zip(self._arenas, ranges, strict=True):
            arena.reset(in_use)

    def prefault(self, nbytes: int) -> None:
        """Reserve and fault in `nbytes` more. Called off the training thread."""
        for index, arena in enumerate(self._arenas):
            if index not in self._full:
                try:
                    arena.prefault(nbytes)
                except OSError as error:
                    if not no_room(error):
                        raise
                    continue  # reported by the training thread when it needs the room
                return

    def _note_full(self, index: int) -> None:
        if index not in self._full:
            self._full.add(index)
            where = (self._spool.path, self._spool.overflow)[index]
            self._warn(f"{where} has no more room for the capture buffer.")

    def _add_overflow(self, nbytes: int) -> bool:
        capacity = max(self.limit_bytes - self._arenas[0].reserved, 0)
        if capacity < nbytes:
            return False
        try:
            folder = self._spool.make_overflow()
            (folder / arena_name(1)).unlink(missing_ok=True)  # left by an interrupted attempt
            arena = Arena(folder / arena_name(1), capacity)
        except (OSError, SpoolUnavailable) as error:
            if not self._overflow_failed:
                self._overflow_failed = True
                self._warn(f"No room for the rest of the capture buffer on disk either: {error}")
            return False
        self._warn(
            f"The rest of the capture buffer goes to disk ({folder}); capture will be slower."
        )
        self._arenas.append(arena)
        return True

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
