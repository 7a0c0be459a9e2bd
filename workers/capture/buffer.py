"""The bounded memory between training and upload: arenas, and who still needs which range.

Called by `Capture` under its lock. A range taken is pinned with the ordinal of the journal record
that names it, and free again once the uploader has acknowledged that ordinal.

The journal's bytes that are not acknowledged count too: small values travel in it. A margin beyond
the limit is for its records alone, so that what was dropped can be said when the buffer is full.

Parts that come one by one, and whose record follows at once, are cut from a *strip*, one after the
other: it is taken, pinned and freed as one range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from smdist.errors import SpoolUnavailable
from smdist.workers.arena import Arena, arena_name, rounded
from smdist.workers.spool import Spool, no_room

__all__ = ["Buffer", "Spot", "Strip"]

STRIP_BYTES = 8 << 20
_STRIP_SHARE = 16  # that part of the buffer at most
_MARGIN_SHARE, _LEAST_MARGIN = 8, 64 << 10


class Spot(NamedTuple):
    arena: int
    offset: int
    nbytes: int
    address: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


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
        self._full = [False]  # the file system under that arena has no room left
        # Plain tuples of numbers: the garbage collector does not follow those. Objects that pile up
        # here by the thousand would make it go through all of the training script's, again and again.
        self._pinned: deque[tuple[int, int, int, int]] = deque()
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
                return Spot(index, offset, nbytes, arena.address + offset)
        if self._full == [True] and self._add_overflow(nbytes):
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
        if strip.at > strip.start:
            self._pinned.append((ordinal, strip.arena, strip.start, strip.at - strip.start))
        if strip.end > strip.at:
            self._arenas[strip.arena].give(strip.at, strip.end - strip.at)
        strip.start = strip.at = strip.end = 0

    def view(self, spot: Spot) -> memoryview:
        return self._arenas[spot.arena].view[spot.offset : spot.end]

    def pin(self, spot: Spot, ordinal: int) -> None:
        self._pinned.append((ordinal, spot.arena, spot.offset, spot.nbytes))

    def give_back(self, spot: Spot) -> None:
        self._arenas[spot.arena].give(spot.offset, spot.nbytes)

    def reclaim(self, acked: int) -> None:
        """Free what every record below `acked` named."""
        pinned = self._pinned
        while pinned and pinned[0][0] < acked:
            _, arena, offset, nbytes = pinned.popleft()
            self._arenas[arena].give(offset, nbytes)
        marks = self._marks
        while marks and marks[0][0] <= acked:
            self._stored = marks.popleft()[1]

    def warm(self, nbytes: int) -> None:
        """Have `nbytes` more ready; called off the training thread."""
        for index, arena in enumerate(self._arenas):
            if not self._full[index]:
                try:
                    arena.warm(nbytes)
                except OSError as error:
                    if not no_room(error):
                        raise
                    continue  # the training thread will meet it, and say so, if it needs the room
                return

    def _note_full(self, index: int) -> None:
        if not self._full[index]:
            self._full[index] = True
            where = (self._spool.path, self._spool.overflow)[index]
            self._say(f"{where} has no more room for the capture buffer")

    def _add_overflow(self, nbytes: int) -> bool:
        capacity = max(self.limit_bytes - self._arenas[0].reserved, 0)
        if capacity < nbytes:
            return False
        try:
            folder: Path = self._spool.make_overflow()
            arena = Arena(folder / arena_name(1), capacity)
        except (OSError, SpoolUnavailable) as error:
            if not self._refused:
                self._refused = True
                self._say(f"no room for the rest of the capture buffer on disk either: {error}")
            return False
        self._say(f"the rest of the capture buffer goes to disk: {folder}; capture will be slower")
        self._arenas.append(arena)
        self._full.append(False)
        return True

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
