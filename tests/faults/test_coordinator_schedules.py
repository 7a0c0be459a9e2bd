"""Coordinators die at any request; the merged view comes out as if none had ever been there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from smdist.coordination.service import run_follower
from smdist.storage.in_memory import MemoryStore
from tests.support.coordinator_driver import Life, Schedule
from tests.support.sampling import rotating_share

MOST_TURNS = 600


def lives(schedule: Schedule) -> Iterator[Life]:
    """Each one ends somewhere, and meets some faults before; the last one may live."""
    draw = schedule.random
    for _ in range(draw.randint(2, 12)):
        faults = {draw.randrange(120) for _ in range(draw.choice((0, 0, 3, 8)))}
        kill_at = draw.choice((draw.randrange(12), draw.randrange(60), draw.randrange(300)))
        yield Life(schedule.store, kill_at, draw.random() < 0.5, frozenset(faults))
    while True:
        yield Life(schedule.store)


def carry_out(schedule: Schedule) -> None:
    draw, source = schedule.random, lives(schedule)
    worlds = [draw.randint(1, 4) for _ in range(draw.choice((1, 2, 2)))]
    first = 0
    for i, world in enumerate(worlds):
        schedule.start(world, first)
        last = first + draw.randint(3, 12)
        # The attempt that is not the last dies in the middle, and some steps are run again.
        turns = MOST_TURNS if i == len(worlds) - 1 else draw.randint(5, 30)
        while turns and schedule.work(last):
            turns -= 1
            for _ in range(draw.choice((0, 1, 2))):
                schedule.look(source)
        state = draw.choice(("lost", "ended"))
        for writer in [*schedule.ranks]:
            writer.now = schedule.clock
            writer.flush("lost" if state == "lost" else "ended")
        for _ in range(draw.choice((0, 8, 20))):
            schedule.look(source)
        first = max(0, min(schedule.next_step.values()) - draw.randint(0, 2))
    for _ in range(MOST_TURNS):
        if schedule.watcher is not None and schedule.watcher.state == "finished":
            break
        schedule.look(source)
        schedule.clock += 10.0


def has_backlog(block: int) -> bool:
    return block % 2 == 1


BLOCKS = rotating_share(range(8), 4, kind=has_backlog)


@pytest.mark.parametrize("block", BLOCKS)
def test_view_is_the_same_whichever_process_dies(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_backlog(block):
        monkeypatch.setattr(run_follower, "_MAX_LOOSE_ENTRIES", 7)
    done: Counter[str] = Counter()
    for seed in range(25 * block, 25 * (block + 1)):
        schedule = Schedule(MemoryStore(f"seed-{seed}"), seed)
        try:
            carry_out(schedule)
            schedule.judge()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {schedule.deeds}") from error
        done += schedule.deeds
    assert done["killed"] > 40, done
    assert done["snapshots"] > 150, done
    assert done["resumed"], done
