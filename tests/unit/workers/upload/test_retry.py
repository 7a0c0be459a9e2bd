from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smdist.errors import StoreError, StoreFull
from smdist.messages import readable_bytes
from smdist.workers.spool.ack_page import AckPage
from smdist.workers.upload.retry import ForeignObject, Retrier, RetryDeadlineExceeded


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
def retrier(ack_page: AckPage, said: list[str]) -> Retrier:
    return Retrier(ack_page, said.append, lambda: 3 << 20)


FULL = StoreFull("/data", "segments/x", "put", "No space left; free some")


def test_it_tries_again_tells_once_and_takes_it_back(
    retrier: Retrier, ack_page: AckPage, said: list[str]
) -> None:
    door = Door(3, FULL)
    assert asyncio.run(retrier.run("writing", door)) == "through"
    assert door.tries == 4
    assert len(said) == 2
    assert "put 'segments/x' in /data: No space left; free some" in said[0]
    assert "3.0 MiB wait" in said[0]
    assert said[1] == "the store works again"
    assert ack_page.last_error == ""


def test_what_works_at_once_is_not_worth_a_word(retrier: Retrier, said: list[str]) -> None:
    assert asyncio.run(retrier.run("writing", Door(0, FULL))) == "through"
    assert said == []


def test_one_that_works_does_not_hide_one_that_fails(
    retrier: Retrier, ack_page: AckPage, said: list[str]
) -> None:
    stuck = object()
    retrier.failed(stuck, "writing", FULL)
    asyncio.run(retrier.run("writing", Door(1, FULL)))
    assert "fails since" in ack_page.last_error
    assert len(said) == 1
    retrier.succeeded(stuck)
    assert ack_page.last_error == ""
    assert said[1:] == ["the store works again"]


def test_a_courtesy_that_failed_does_not_keep_it_from_taking_back_what_it_said(
    retrier: Retrier, ack_page: AckPage, said: list[str]
) -> None:
    retrier.failed("heartbeat", "writing the heartbeat", FULL, notify_user=False)
    assert said == []
    asyncio.run(retrier.run("writing", Door(1, FULL)))
    assert said[1:] == ["the store works again"]
    assert "fails since" in ack_page.last_error
    retrier.succeeded("heartbeat")
    assert ack_page.last_error == ""
    assert len(said) == 2


def test_a_courtesy_that_fails_does_not_hide_what_is_stuck(
    retrier: Retrier, ack_page: AckPage
) -> None:
    retrier.failed("heartbeat", "writing the heartbeat", FULL, notify_user=False)
    assert "the heartbeat" in ack_page.last_error, "as long as nothing else fails"
    retrier.failed("segment", "writing to the store", FULL)
    retrier.failed("heartbeat", "writing the heartbeat", FULL, notify_user=False)
    assert ack_page.last_error.startswith("writing to the store fails since ")
    retrier.succeeded("segment")
    assert ack_page.last_error.startswith("writing the heartbeat fails since ")


def test_what_is_stuck_longest_is_named_until_it_is_through(
    retrier: Retrier, ack_page: AckPage
) -> None:
    retrier.failed("segment", "writing to the store", FULL)
    retrier.failed("run", "reading the store", FULL)
    assert ack_page.last_error.startswith("writing to the store ")
    retrier.succeeded("segment")
    assert ack_page.last_error.startswith("reading the store ")


def test_the_words_of_an_error_get_no_advice_added(retrier: Retrier, ack_page: AckPage) -> None:
    error = StoreError("s3://b/run", "k", "put", "cannot be reached; check the endpoint")
    retrier.failed("x", "writing", error)
    assert ack_page.last_error.endswith(f": {error}")


def test_the_same_is_said_rarely(
    retrier: Retrier, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    times = []
    for second in range(4000):
        now = 1000.0 + second
        before = len(said)
        retrier.failed("x", "writing", FULL)
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


def test_only_a_deadline_without_success_ends_it(retrier: Retrier, clock: Clock) -> None:
    retrier.set_idle_deadline(15.0)
    retrier.set_idle_deadline(1000.0)  # the first one counts
    door = SlowDoor(10**9, clock)
    with pytest.raises(RetryDeadlineExceeded, match="No space left"):
        asyncio.run(retrier.run("writing", door))
    assert door.tries == 2
    assert retrier.expired


def test_what_goes_on_slowly_is_not_given_up(retrier: Retrier, clock: Clock) -> None:
    retrier.set_idle_deadline(25.0)
    for _ in range(10):
        assert asyncio.run(retrier.run("writing", SlowDoor(1, clock))) == "through"
        assert not retrier.expired
    clock.now += 25.0
    assert retrier.expired, "a store that says nothing at all"


def test_parts_of_a_long_operation_are_progress_unless_something_fails(
    retrier: Retrier, clock: Clock
) -> None:
    retrier.set_idle_deadline(15.0)
    for count in range(1, 10):
        clock.now += 10.0
        retrier.note_progress(count)
        assert not retrier.expired
    retrier.failed("put", "writing", FULL)  # from now on the same parts are sent again
    clock.now += 10.0
    retrier.note_progress(10)
    assert not retrier.expired
    clock.now += 10.0
    retrier.note_progress(11)
    assert retrier.expired


def test_told_to_stop_it_does_so_whatever_goes_well(retrier: Retrier) -> None:
    retrier.set_idle_deadline(1000.0)
    retrier.stop()
    assert asyncio.run(retrier.run("writing", Door(0, FULL))) == "through"
    assert retrier.expired
    with pytest.raises(RetryDeadlineExceeded):
        asyncio.run(retrier.run("writing", Door(1, FULL)))


def test_it_tries_at_least_once_after_the_deadline(retrier: Retrier) -> None:
    retrier.set_idle_deadline(0.0)
    assert asyncio.run(retrier.run("writing", Door(0, FULL))) == "through"


def test_a_conflict_is_not_tried_again(retrier: Retrier) -> None:
    door = Door(5, ForeignObject("not ours"))
    with pytest.raises(ForeignObject):
        asyncio.run(retrier.run("writing", door))
    assert door.tries == 1


def test_only_what_was_asked_for_is_borne(retrier: Retrier) -> None:
    with pytest.raises(KeyError):
        asyncio.run(retrier.run("reading", Door(5, KeyError("x")), retry_on=(OSError,)))


def test_pauses_grow_and_vary(retrier: Retrier, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(retrier.run("writing", Door(30, StoreError("u", "k", "put"))))
    assert all(0.025 * 2**i <= pause <= 0.05 * 2**i for i, pause in enumerate(pauses[:7]))
    assert all(5.0 <= pause <= 10.0 for pause in pauses[9:])
    assert len(set(pauses[9:])) > 5


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_readable_bytes(nbytes: int, text: str) -> None:
    assert readable_bytes(nbytes) == text
