"""When to write, and how much: the uploader's decision, taken at each wake-up.

The uploader owns a `Pending`, adds what the journal gives it, and asks `decide` until the answer is
"nothing now". Times are of one clock of the uploader's (monotonic): a record's age counts from when
the uploader saw it, so a wall clock that jumps changes nothing.

- A *cut* is a place between records where no step is open. Batches end at cuts where possible.
- Size: once `segment_bytes` are pending, as many whole steps as fit in them; a bigger step goes alone.
- Number: once records and tensors take `MOST_HELD` bytes in memory, whole steps, or what there is.
- Age: whole steps after `linger_s`; an open step only after `OPEN_LINGER` times that.
- `Flush`, `End` and a drain (the training process is dead) want everything, still in batches of
  about `segment_bytes`.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple, Protocol

from smdist.format.journal_records import (
    Close,
    Declare,
    Describe,
    Drop,
    End,
    Flush,
    Inline,
    Part,
    Piece,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MOST_HELD", "OPEN_LINGER", "BatchLimits", "Decision", "Pending", "decide"]

OPEN_LINGER = 4.0
MOST_HELD = 16 << 20  # bytes of memory for what is pending, however few it has in the store
_RECORD, _TENSOR = 2 << 10, 1 << 10  # of these, for each one: as read, folded and laid out


class BatchLimits(Protocol):
    @property
    def linger_s(self) -> float: ...

    @property
    def segment_bytes(self) -> int: ...


class Decision(NamedTuple):
    """Write the records below `upto` now, or (None) sleep until `wake_at`, or (None) until news."""

    upto: int | None
    wake_at: float | None


class _Item(NamedTuple):
    piece: Piece
    end: int  # bytes up to and with this record, from the start of the session
    held: int  # bytes of memory that it takes
    seen: float


class Pending:
    """Records that are in the journal and not yet in the store. Adding one costs O(1)."""

    def __init__(self) -> None:
        self._items: list[_Item] = []
        self._start = 0  # the `end` of the last record taken
        self._end = 0
        self._held = 0
        self._cuts: list[tuple[int, int]] = []  # (end, upto), ascending
        self.loose: int | None = None  # after a Close, though another step is open
        self._open: set[tuple[int, int]] = set()
        self._finished: dict[int, int] = {}  # mode -> highest mode_step that was closed
        self.since: float | None = None  # when the first record that wants to be written was seen
        self.open_since: float | None = None  # the same behind the last cut
        self.urgent = 0  # Flush and End records among the items

    def __len__(self) -> int:
        return len(self._items)

    @property
    def nbytes(self) -> int:
        return self._end - self._start

    @property
    def full(self) -> bool:
        """No more is to be added before some is taken."""
        return self._held >= MOST_HELD

    @property
    def upto(self) -> int:
        """The ordinal after the last pending record; there is one."""
        return self._items[-1].piece.ordinal + 1

    @property
    def last_cut(self) -> int | None:
        return self._cuts[-1][1] if self._cuts else None

    def add(self, pieces: Iterable[Piece], now: float) -> None:
        for piece in pieces:
            self._end += _size(piece)
            held = _RECORD + _TENSOR * (len(piece.kind.tensors) if piece.kind is not None else 0)
            self._held += held
            self._items.append(_Item(piece, self._end, held, now))
            self._note(piece, now)

    def _note(self, piece: Piece, now: float) -> None:
        record, upto = piece.record, piece.ordinal + 1
        if isinstance(record, (Flush, End)):
            self.urgent += 1
        if isinstance(record, (Declare, Flush)):
            return  # nothing to write
        if self.since is None:
            self.since = now
        if isinstance(record, (Part, Inline, Drop)):
            # A part that comes after its Close gets no second one: it opens nothing.
            if record.mode_step > self._finished.get(record.mode, -1):
                self._open.add((record.mode, record.mode_step))
        elif isinstance(record, Close):
            finished = max(record.mode_step, self._finished.get(record.mode, -1))
            self._finished[record.mode] = finished
            self._open.discard((record.mode, record.mode_step))
            self.loose = upto
        if self._open:
            self.open_since = now if self.open_since is None else self.open_since
        else:
            self._cuts.append((self._end, upto))
            self.open_since = None

    def take(self, upto: int) -> tuple[Piece, ...]:
        """Remove and return the records below `upto`."""
        if not self._items:
            return ()
        count = max(0, upto - self._items[0].piece.ordinal)
        taken, self._items = self._items[:count], self._items[count:]
        if taken:
            self._start = taken[-1].end
            self._held -= sum(item.held for item in taken)
        self.urgent -= sum(isinstance(item.piece.record, (Flush, End)) for item in taken)
        self._cuts = [cut for cut in self._cuts if cut[1] > upto]
        if self.loose is not None and self.loose <= upto:
            self.loose = None
        self.since = self._seen_from(0)
        if self.open_since is not None:
            behind = self._cuts[-1][1] if self._cuts else 0
            self.open_since = self._seen_from(behind)
        return tuple(item.piece for item in taken)

    def _seen_from(self, ordinal: int) -> float | None:
        for item in self._items:
            if item.piece.ordinal >= ordinal and not isinstance(
                item.piece.record, (Declare, Flush)
            ):
                return item.seen
        return None

    def cut_within(self, nbytes: int) -> int | None:
        """Return the last cut that keeps the batch within `nbytes`, else the first one."""
        index = bisect_right(self._cuts, (self._start + nbytes, self._items[-1].piece.ordinal + 1))
        return self._cuts[max(index - 1, 0)][1] if self._cuts else None


def _size(piece: Piece) -> int:
    if isinstance(piece.record, Part):
        return piece.kind.nbytes if piece.kind is not None else 0
    if isinstance(piece.record, (Inline, Describe)):
        return len(piece.record.data)
    return 0


def decide(pending: Pending, limits: BatchLimits, now: float, *, drain: bool = False) -> Decision:
    """Pure: what to do with `pending` at `now`. Cheap: it looks at sums and cuts, not at records."""
    if not pending:
        return Decision(None, None)
    everything = pending.upto
    if drain or pending.urgent:
        cut = pending.cut_within(limits.segment_bytes)
        fits = pending.nbytes <= limits.segment_bytes and not pending.full
        return Decision(everything if fits or cut is None else cut, None)
    if pending.nbytes >= limits.segment_bytes or pending.full:
        cut = pending.cut_within(limits.segment_bytes)
        cut = pending.loose if cut is None else cut
        cut = everything if cut is None and pending.full else cut
        if cut is not None:
            return Decision(cut, None)
    wakes = []
    if pending.since is not None and pending.last_cut is not None:
        wakes.append((pending.since + limits.linger_s, pending.last_cut))
    if pending.open_since is not None:
        wakes.append((pending.open_since + OPEN_LINGER * limits.linger_s, everything))
    due = [upto for at, upto in wakes if at <= now]
    if due:
        return Decision(max(due), None)
    return Decision(None, min((at for at, _ in wakes), default=None))
