"""Limits of decoded values, sets of numbers as ranges, and text that is safe to show."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.checking import check
from smdist.coordination.view.run_view import World
from smdist.errors import CorruptObject
from smdist.format.intervals import (
    Members,
    check_intervals,
    merge_intervals,
    subtract,
    to_intervals,
)
from smdist.format.manifest import RankManifest, StepEntry
from smdist.format.stored_json import decode, encode
from smdist.limits import MAX_NUMBER, MAX_RANKS, Digest, MergedKey, Rank, SegmentKey
from smdist.messages import printable
from smdist.workers.hook.error_policy import ErrorPolicy
from smdist.workers.spool.logs import logger

numbers = st.sets(st.integers(0, 40))


@given(numbers, numbers)
def test_ranges_are_subtracted_like_sets(some: set[int], others: set[int]) -> None:
    left = subtract(to_intervals(some), to_intervals(others))
    check_intervals(left)
    assert list(Members(left)) == sorted(some - others)
    assert merge_intervals((*left, *to_intervals(others))) == to_intervals(some | others)


@given(numbers)
def test_members_are_the_numbers_of_a_set(some: set[int]) -> None:
    members = Members(to_intervals(some))
    assert members == tuple(sorted(some))
    assert (len(members), bool(members)) == (len(some), bool(some))
    assert [number in members for number in range(42)] == [number in some for number in range(42)]


def test_members_of_a_vast_set_are_not_listed() -> None:
    vast = Members(((0, 5), (10, 1 << 61)))
    assert len(vast) == (1 << 61) - 5
    assert 7 not in vast
    assert (1 << 60) in vast
    assert next(iter(vast)) == 0
    assert subtract(vast.intervals, ((3, 1 << 60),)) == ((0, 3), (1 << 60, 1 << 61))


@pytest.mark.parametrize("spans", [((1, 1),), ((2, 1),), ((0, 2), (1, 3)), ((0, 2), (2, 3))])
def test_invalid_intervals_are_rejected(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="is not an interval"):
        check_intervals(spans)


def entry(**more: object) -> StepEntry:
    plain = StepEntry(1, 0, 0, 0, True, "abc", "segments/worker_0/x", 0, 0.0, 0.0)
    return msgspec.structs.replace(plain, **more)


def manifest(*steps: StepEntry, **more: object) -> RankManifest:
    plain = RankManifest("s", 0, 1, 0, "all", 0, 0, 1, "active", 0.0, steps)
    return msgspec.structs.replace(plain, **more)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (manifest(entry(), entry(offset=-1)), "steps: offset: -1 is not between 0"),
        (manifest(entry(mode=5), entry()), "steps: mode: 5 is not between 1 and 4"),
        (manifest(entry(step=MAX_NUMBER + 1)), f"step: {MAX_NUMBER + 1} is not between 0"),
        (manifest(entry(segment="../x")), "segment: '../x' is not a key"),
        (manifest(rank=MAX_RANKS), f"rank: {MAX_RANKS} is not between 0 and {MAX_RANKS - 1}"),
        (manifest(include_workers="both"), "include_workers: 'both' is not a choice of workers"),
        (manifest(include_workers=(0, -1)), "include_workers: -1 is not between 0"),
    ],
)
def test_field_out_of_range_is_named(made: RankManifest, said: str) -> None:
    data = encode(made, "manifests/k")
    with pytest.raises(CorruptObject, match="read") as caught:
        decode(data, RankManifest, "manifests/k", "url")
    assert caught.value.key == "manifests/k"
    assert said in str(caught.value)


def test_values_in_range_are_decoded() -> None:
    made = manifest(entry(segment="."), entry(segment="", offset=MAX_NUMBER), entry(layout=""))
    for one in (made, manifest(include_workers=(0, 7))):
        assert decode(encode(one, "k"), RankManifest, "k") == one


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Rank, 0, -1),
        (Digest, "0af", "a/b"),
        (SegmentKey, "a/b.c", "a/.b"),
        (SegmentKey, ".", ".."),
        (SegmentKey, "a/b", "/a"),
        (SegmentKey, "a/b", "a/b\0"),
        (SegmentKey, "a/b", "a//b"),
        (MergedKey, "merged/heads/x.json", "segments/x"),
        (MergedKey, "merged/heads/x.json", "merged/heads/../../x"),
        (tuple[tuple[Rank, str], ...], ((1, ""), (2, "")), ((1, ""), (-2, ""))),
    ],
)
def test_constraints(kind: object, good: object, bad: object) -> None:
    check(kind, good)
    with pytest.raises(ValueError, match="is n"):
        check(kind, bad)


def test_expected_ranks_are_an_interval() -> None:
    assert World(MAX_RANKS, "all").expected_ranks() == ((0, MAX_RANKS),)
    assert World(3, (2, 0, 7, 10**12)).expected_ranks() == ((0, 1), (2, 3))


def test_interpreter_exits_cleanly_after_decoding() -> None:
    """Constraints of msgspec itself crash an interpreter now and then when it ends."""
    script = (
        "import msgspec, smdist.format.manifest as m, smdist.format.stored_json as s\n"
        "try: s.parse(b'{}', m.RankSummary, 'k')\n"
        "except Exception: pass\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(8)]
    assert [one.wait(60) for one in running] == [0] * 8


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 日本 🔥", "plain ü 日本 🔥"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\r\nb\t", "a\\r\\nb\\t"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("\x9b\x7f\u2028", "\\x9b\\x7f\\u2028"),
        ("\ud800", "\\ud800"),
    ],
)
def test_printable_text(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_a_log_shows_names_and_errors_without_control_characters() -> None:
    stream, found = io.StringIO(), logger()
    handler = logging.StreamHandler(stream)
    found.addHandler(handler)
    try:
        errors = ErrorPolicy("warn", found)
        errors.warn_once("tensor \x1b[2J\nfake line")
        try:
            raise RuntimeError("\x1b]0;title\x07")
        except RuntimeError as error:
            errors.on_exception(error, "step 3")
        found.warning("plain\nlines")
    finally:
        found.removeHandler(handler)
    text = stream.getvalue()
    assert all(c.isprintable() or c == "\n" for c in text), text
    assert "tensor \\x1b[2J\\nfake line" in text
    assert "plain\nlines" in text
    assert "Traceback" in text
