"""The bounded memory between training and upload: arenas, and who still needs which range.

Called by `Capture` under its lock. A range taken is pinned with the ordinal of the journal record
that names it, and free again once the uploader has acknowledged that ordinal.

Which ranges are in use is the truth, kept in one dict: an entry is made before anybody writes into its
range and changed by one assignment. What is free, and in which order ranges become free, follows from
it: `settle` works that out again after an exception that came in the middle of something.

The journal's bytes that are not acknowledged count too: small values travel in it. A margin beyond
the limit is for its records alone, so that what was dropped can be said when the buffer is full.

Parts that come one by one, and whose record follows at once, are cut from a *strip*, one after the
other: it is taken, pinned and freed as one range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple

from smdist.errors import SpoolUnavailable
from smdist.workers.capture.arena import Arena, arena_name, rounded
from smdist.workers.spool.spool import Spool, no_room

__all__ = ["Buffer", "Spot", "Strip"]

STRIP_BYTES = 8 << 20
_STRIP_SHARE = 16  # that part of the buffer at most
_MARGIN_SHARE, _LEAST_MARGIN = 8, 64 << 10
_HELD = 1 << 62  # in the place of an ordinal: no record names the range yet
_ARENA = 56  # bits of a key that are below the number of its arena


class Spot(NamedTuple):
    arena: int
    offset: int
    nbytes: int
    address: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def key(self) -> int:
        return self.arena << _ARENA | self.offset


class Strip:
    """Its next part goes to `at`, in an arena that begins at `address`, and moves that on."""

    __slots__ = ("address", "arena", "at", "end", "start")

    def __init__(self) -> None:
        self.arena = self.address = self.start = self.at = self.end = 0


class Buffer:
    def __init__(self, spool: Spool, limit_bytes: int, say: Callable[[str], None]) -> None:
        self.limit_bytes = limit_bytes
        self._spool, self._say = spool, say
        self._arenas = [Arena(spool.path / arena_name(0), limit_bytes)]
        self._refused = False  # even the disk
        self._full: set[int] = set()  # arenas whose file system has no room left
        # Plain tuples of numbers: the garbage collector does not follow those. Objects that pile up
        # here by the thousand would make it go through all of the training script's, again and again.
        self._in_use: dict[int, tuple[int, int]] = {}  # arena and offset -> bytes, ordinal
        self._pinned: deque[tuple[int, int]] = deque()  # ordinal and key, in order
        self._marks: deque[tuple[int, int]] = deque()  # a record, and the journal's bytes before it
        self._stored = self._granted = 0  # bytes of the journal: acknowledged; allowed
        self.margin_bytes = max(limit_bytes // _MARGIN_SHARE, _LEAST_MARGIN)
        self.strip = Strip()
        self._strip_bytes = rounded(min(STRIP_BYTES, limit_bytes // _STRIP_SHARE))

    @property
    def used_bytes(self) -> int:
        return sum(arena.used for arena in self._arenas)

    @property
    def spare_bytes(self) -> int:
        return sum(arena.spare for arena in self._arenas)

    def take(self, nbytes: int) -> Spot | None:
        """A place for `nbytes`, None when the limit or the file systems leave none."""
        nbytes = nbytes or 1  # a range of its own, even for nothing
        if self._over(nbytes):
            return None
        for index, arena in enumerate(self._arenas):
            try:
                offset = arena.take(nbytes)
            except OSError as error:
                if not no_room(error):
                    raise
                self._note_full(index)
                continue
            if offset >= 0:
                self._in_use[index << _ARENA | offset] = (rounded(nbytes), _HELD)
                return Spot(index, offset, nbytes, arena.address + offset)
        if len(self._arenas) == 1 and self._full and self._add_overflow(nbytes):
            return self.take(nbytes)
        return None

    def renew(self, nbytes: int, ordinal: int) -> bool:
        """Have a strip with room for `nbytes`; the last record so far is `ordinal`. False: no room.

        It is of memory that is at hand: more than `nbytes` is not asked for.
        """
        self.retire(ordinal)
        most = max(rounded(nbytes), self._strip_bytes)
        offset, size = (-1, 0) if self._over(most) else self._arenas[0].take_some(nbytes, most)
        spot = Spot(0, offset, size, 0) if offset >= 0 else self.take(rounded(nbytes))
        if spot is None:
            return False
        self._in_use[spot.key] = (spot.nbytes, _HELD)
        strip = self.strip
        strip.arena, strip.address = spot.arena, self._arenas[spot.arena].address
        strip.start = strip.at = spot.offset
        strip.end = spot.end
        return True

    def _over(self, nbytes: int) -> bool:
        waiting = self.used_bytes + self._granted - self._stored
        return waiting + nbytes > self.limit_bytes + self.margin_bytes // 2

    def grant(self, need: int, written: int, ordinal: int, *, values: bool) -> int:
        """How many bytes the journal may grow by, at least `need`; 0: the limit leaves no room.

        It has `written` bytes, before record `ordinal`. If it is for `values`, half of the margin is
        left to records that hold none.
        """
        self.mark(written, ordinal)
        reserve = self.margin_bytes // 2
        room = self.limit_bytes + reserve - self.used_bytes - (written - self._stored)
        if room >= need:
            granted = min(max(reserve // 2, need), room)
        else:
            granted = need if not values and room + reserve >= need else 0
        self._granted = written + granted
        return granted

    def mark(self, written: int, ordinal: int) -> None:
        """The journal has `written` bytes, before record `ordinal`: free once all below it is stored."""
        if not self._marks or self._marks[-1][1] < written:
            self._marks.append((ordinal, written))

    def retire(self, ordinal: int) -> None:
        """Pin what was cut from the strip with the last record so far, give back the rest."""
        strip = self.strip
        if strip.end:
            spot = Spot(strip.arena, strip.start, strip.end - strip.start, 0)
            used = strip.at - strip.start
            if used:
                self.pin(spot._replace(nbytes=used), ordinal)
            else:
                del self._in_use[spot.key]
            self._arenas[strip.arena].give(strip.at, strip.end - strip.at)
            strip.start = strip.at = strip.end = 0

    def view(self, spot: Spot) -> memoryview:
        return self._arenas[spot.arena].view[spot.offset : spot.end]

    def pin(self, spot: Spot, ordinal: int) -> None:
        self._in_use[spot.key] = (rounded(spot.nbytes), ordinal)
        self._pinned.append((ordinal, spot.key))

    def give_back(self, spot: Spot) -> None:
        del self._in_use[spot.key]
        self._arenas[spot.arena].give(spot.offset, spot.nbytes)

    def reclaim(self, acked: int) -> None:
        """Free what every record below `acked` named."""
        pinned = self._pinned
        while pinned and pinned[0][0] < acked:
            key = pinned.popleft()[1]
            nbytes, _ = self._in_use.pop(key)
            self._arenas[key >> _ARENA].give(key & (1 << _ARENA) - 1, nbytes)
        marks = self._marks
        while marks and marks[0][0] <= acked:
            self._stored = marks.popleft()[1]

    def settle(self, ordinal: int, awaited: Container[int]) -> None:
        """After an exception: what is in use stays so, all else is free.

        Held ranges may be named by a record up to `ordinal`, the last one, or by none: they are kept
        until that is stored. Those in `awaited` are held by somebody who goes on.
        """
        for key, (nbytes, state) in tuple(self._in_use.items()):
            if state == _HELD and key not in awaited:
                self._in_use[key] = (nbytes, ordinal)
        strip = self.strip
        strip.start = strip.at = strip.end = 0
        known = sorted((state, key) for key, (_, state) in self._in_use.items() if state != _HELD)
        self._pinned = deque(known)
        ranges: list[list[tuple[int, int]]] = [[] for _ in self._arenas]
        for key, (nbytes, _) in self._in_use.items():
            ranges[key >> _ARENA].append((key & (1 << _ARENA) - 1, nbytes))
        for arena, in_use in zip(self._arenas, ranges, strict=True):
            arena.reset(in_use)

    def warm(self, nbytes: int) -> None:
        """Have `nbytes` more ready; called off the training thread."""
        for index, arena in enumerate(self._arenas):
            if index not in self._full:
                try:
                    arena.warm(nbytes)
                except OSError as error:
                    if not no_room(error):
                        raise
                    continue  # the training thread will meet it, and say so, if it needs the room
                return

    def _note_full(self, index: int) -> None:
        if index not in self._full:
            self._full.add(index)
            where = (self._spool.path, self._spool.overflow)[index]
            self._say(f"{where} has no more room for the capture buffer")

    def _add_overflow(self, nbytes: int) -> bool:
        capacity = max(self.limit_bytes - self._arenas[0].reserved, 0)
        if capacity < nbytes:
            return False
        try:
            folder: Path = self._spool.make_overflow()
            (folder / arena_name(1)).unlink(missing_ok=True)  # of a try that was interrupted
            arena = Arena(folder / arena_name(1), capacity)
        except (OSError, SpoolUnavailable) as error:
            if not self._refused:
                self._refused = True
                self._say(f"no room for the rest of the capture buffer on disk either: {error}")
            return False
        self._say(f"the rest of the capture buffer goes to disk: {folder}; capture will be slower")
        self._arenas.append(arena)
        return True

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
