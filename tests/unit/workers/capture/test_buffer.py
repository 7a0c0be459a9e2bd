"""Which ranges of the buffer are in use: never one for two, none for ever, whatever cuts in."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from smdist.format.manifest import Run, Session
from smdist.workers.capture.buffer import ArenaRange, CaptureBuffer
from smdist.workers.spool.spool import Spool, SpoolInfo, UploadOptions
from tests.support.cuts import Cut, Cuts

LIMIT = 256 << 10


class Model:
    """A buffer as a capture uses it: what is cut off is made good before the next operation."""

    def __init__(self, root: Path) -> None:
        session = Session("s" * 32, 0, 1, 0, "all", 0.0, "host", 1, "")
        info = SpoolInfo(Run("run", 0.0, "numpy"), session, "/", UploadOptions(), 1, 0, "")
        self.buffer = CaptureBuffer(Spool.create(info, root), LIMIT, lambda _text: None)
        self.held: list[ArenaRange] = []
        self.named: list[tuple[int, ArenaRange]] = []  # by a record
        self.ordinal = self.acked = 0
        self.cut = False

    def allocate(self, nbytes: int) -> None:
        if (place := self.buffer.allocate(nbytes)) is not None:
            self.held.append(place)

    def hold_until_ack(self, _: int) -> None:
        if self.held:
            place = self.held[0]
            self.named.append((self.ordinal, place))  # the record comes first
            self.ordinal += 1
            self.buffer.hold_until_ack(place, self.ordinal - 1)
            self.held.remove(place)

    def release(self, _: int) -> None:
        if self.held:
            self.buffer.release(self.held[-1])
            self.held.pop()

    def region(self, nbytes: int) -> None:
        region = self.buffer.region
        if region.end - region.at < nbytes and not self.buffer.open_region(
            nbytes, self.ordinal - 1
        ):
            return
        at, region.at = region.at, region.at + nbytes + -nbytes % 64
        self.named.append((self.ordinal, ArenaRange(region.arena, at, nbytes, 0)))
        self.ordinal += 1

    def seal_region(self, _: int) -> None:
        self.buffer.seal_region(self.ordinal - 1)

    def acknowledge(self, count: int) -> None:
        self.acked = min(self.ordinal, self.acked + count % 7)
        self.named = [(ordinal, place) for ordinal, place in self.named if ordinal >= self.acked]
        self.buffer.reclaim(self.acked)

    def run(self, name: str, number: int, at: int) -> None:
        if self.cut:
            self.repair()
        with Cuts(at) as cuts, suppress(Cut):
            getattr(self, name)(number)
        self.cut = cuts.struck

    def repair(self) -> None:
        self.held.clear()  # nobody is left who would name them
        self.buffer.repair(self.ordinal - 1, ())
        self.cut = False

    def check(self) -> None:
        live = sorted((s.arena, s.offset, s.end) for s in (*self.held, *(s for _, s in self.named)))
        for one, other in pairwise(live):
            assert one[0] != other[0] or one[2] <= other[1], (one, other)


OPERATIONS = st.tuples(
    st.sampled_from(
        ["allocate", "hold_until_ack", "release", "region", "seal_region", "acknowledge"]
    ),
    st.integers(0, 60_000),
    st.one_of(st.just(-1), st.integers(0, 25)),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(OPERATIONS, max_size=60))
def test_no_range_is_allocated_twice_and_none_is_lost(plan: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder))
        for operation in plan:
            model.run(*operation)
            if not model.cut:
                model.check()
        model.repair()
        model.check()
        model.buffer.reclaim(model.ordinal)
        assert model.buffer.used_bytes == 0
        model.buffer.close()
