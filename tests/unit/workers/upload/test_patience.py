from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smdist.errors import StoreError, StoreFull
from smdist.messages import readable_bytes
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.upload.retry import Conflict, GaveUp, Patience


class Door:
    """An operation that fails so many times."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.tries = failures, error, 0

    async def __call__(self) -> str:
        self.tries += 1
        if self.tries <= self.failures:
            raise self.error
        return "through"


@pytest.fixture
def ack_page(tmp_path: Path) -> Iterator[AckPage]:
    ack_page = AckPage(tmp_path / "ack_page")
    yield ack_page
    ack_page.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def patience(ack_page: AckPage, said: list[str]) -> Patience:
    return Patience(ack_page, said.append, lambda: 3 << 20)


FULL = StoreFull("/data", "segments/x", "put", "No space left; free some")


def test_it_tries_again_tells_once_and_takes_it_back(
    patience: Patience, ack_page: AckPage, said: list[str]
) -> None:
    door = Door(3, FULL)
    assert asyncio.run(patience.insist("writing", door)) == "through"
    assert door.tries == 4
    assert len(said) == 2
    assert "put 'segments/x' in /data: No space left; free some" in said[0]
    assert "3.0 MiB wait" in said[0]
    assert said[1] == "the store works again"
    assert ack_page.last_error == ""


def test_what_works_at_once_is_not_worth_a_word(patience: Patience, said: list[str]) -> None:
    assert asyncio.run(patience.insist("writing", Door(0, FULL))) == "through"
    assert said == []


def test_one_that_works_does_not_hide_one_that_fails(
    patience: Patience, ack_page: AckPage, said: list[str]
) -> None:
    stuck = object()
    patience.failed(stuck, "writing", FULL)
    asyncio.run(patience.insist("writing", Door(1, FULL)))
    assert "fails since" in ack_page.last_error
    assert len(said) == 1
    patience.succeeded(stuck)
    assert ack_page.last_error == ""
    assert said[1:] == ["the store works again"]


def test_a_courtesy_that_failed_does_not_keep_it_from_taking_back_what_it_said(
    patience: Patience, ack_page: AckPage, said: list[str]
) -> None:
    patience.failed("heartbeat", "writing the heartbeat", FULL, tell=False)
    assert said == []
    asyncio.run(patience.insist("writing", Door(1, FULL)))
    assert said[1:] == ["the store works again"]
    assert "fails since" in ack_page.last_error
    patience.succeeded("heartbeat")
    assert ack_page.last_error == ""
    assert len(said) == 2


def test_a_courtesy_that_fails_does_not_hide_what_is_stuck(
    patience: Patience, ack_page: AckPage
) -> None:
    patience.failed("heartbeat", "writing the heartbeat", FULL, tell=False)
    assert "the heartbeat" in ack_page.last_error, "as long as nothing else fails"
    patience.failed("segment", "writing to the store", FULL)
    patience.failed("heartbeat", "writing the heartbeat", FULL, tell=False)
    assert ack_page.last_error.startswith("writing to the store fails since ")
    patience.succeeded("segment")
    assert ack_page.last_error.startswith("writing the heartbeat fails since ")


def test_what_is_stuck_longest_is_named_until_it_is_through(
    patience: Patience, ack_page: AckPage
) -> None:
    patience.failed("segment", "writing to the store", FULL)
    patience.failed("run", "reading the store", FULL)
    assert ack_page.last_error.startswith("writing to the store ")
    patience.succeeded("segment")
    assert ack_page.last_error.startswith("reading the store ")


def test_the_words_of_an_error_get_no_advice_added(patience: Patience, ack_page: AckPage) -> None:
    error = StoreError("s3://b/run", "k", "put", "cannot be reached; check the endpoint")
    patience.failed("x", "writing", error)
    assert ack_page.last_error.endswith(f": {error}")


def test_the_same_is_said_rarely(
    patience: Patience, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    times = []
    for second in range(4000):
        now = 1000.0 + second
        before = len(said)
        patience.failed("x", "writing", FULL)
        times += [second] if len(said) > before else []
    assert times == [0, 60, 360, 1260, 2160, 3060, 3960]


class Clock:
    """Stands still unless it is told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("smdist.workers.upload.retry.time", self)

    def monotonic(self) -> float:
        return self.now

    time, strftime, localtime = time.time, time.strftime, time.localtime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class SlowDoor(Door):
    """Every try takes ten seconds of the clock."""

    def __init__(self, failures: int, clock: Clock) -> None:
        super().__init__(failures, FULL)
        self.clock = clock

    async def __call__(self) -> str:
        self.clock.now += 10.0
        return await super().__call__()


def test_only_a_deadline_without_success_ends_it(patience: Patience, clock: Clock) -> None:
    patience.give_up_after(15.0)
    patience.give_up_after(1000.0)  # the first one counts
    door = SlowDoor(10**9, clock)
    with pytest.raises(GaveUp, match="No space left"):
        asyncio.run(patience.insist("writing", door))
    assert door.tries == 2
    assert patience.over


def test_what_goes_on_slowly_is_not_given_up(patience: Patience, clock: Clock) -> None:
    patience.give_up_after(25.0)
    for _ in range(10):
        assert asyncio.run(patience.insist("writing", SlowDoor(1, clock))) == "through"
        assert not patience.over
    clock.now += 25.0
    assert patience.over, "a store that says nothing at all"


def test_parts_of_a_long_operation_are_progress_unless_something_fails(
    patience: Patience, clock: Clock
) -> None:
    patience.give_up_after(15.0)
    for count in range(1, 10):
        clock.now += 10.0
        patience.moved(count)
        assert not patience.over
    patience.failed("put", "writing", FULL)  # from now on the same parts are sent again
    clock.now += 10.0
    patience.moved(10)
    assert not patience.over
    clock.now += 10.0
    patience.moved(11)
    assert patience.over


def test_told_to_stop_it_does_so_whatever_goes_well(patience: Patience) -> None:
    patience.give_up_after(1000.0)
    patience.stop()
    assert asyncio.run(patience.insist("writing", Door(0, FULL))) == "through"
    assert patience.over
    with pytest.raises(GaveUp):
        asyncio.run(patience.insist("writing", Door(1, FULL)))


def test_it_tries_at_least_once_after_the_deadline(patience: Patience) -> None:
    patience.give_up_after(0.0)
    assert asyncio.run(patience.insist("writing", Door(0, FULL))) == "through"


def test_a_conflict_is_not_tried_again(patience: Patience) -> None:
    door = Door(5, Conflict("not ours"))
    with pytest.raises(Conflict):
        asyncio.run(patience.insist("writing", door))
    assert door.tries == 1


def test_only_what_was_asked_for_is_borne(patience: Patience) -> None:
    with pytest.raises(KeyError):
        asyncio.run(patience.insist("reading", Door(5, KeyError("x")), only=(OSError,)))


def test_pauses_grow_and_vary(patience: Patience, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(patience.insist("writing", Door(30, StoreError("u", "k", "put"))))
    assert all(0.025 * 2**i <= pause <= 0.05 * 2**i for i, pause in enumerate(pauses[:7]))
    assert all(5.0 <= pause <= 10.0 for pause in pauses[9:])
    assert len(set(pauses[9:])) > 5


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_readable_bytes(nbytes: int, text: str) -> None:
    assert readable_bytes(nbytes) == text
