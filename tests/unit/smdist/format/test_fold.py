from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.format.block import (
    ObjectLocation,
    checksum_seed,
    entries_by_name,
    read_tensor,
    tensor_ranges,
)
from smdist.format.fold import Block, fold
from smdist.format.journal_records import Declare, Describe, Drop, End, Flush, Part, Piece, Trouble
from smdist.format.manifest import Session
from smdist.format.segment import compose
from smdist.identity import ModeKeys, StepRef
from tests.support.journal_model import Array, Scribe


def names(block: Block) -> list[str]:
    return [spec.name for source in block.sources for spec in source.tensors]


def one(value: float) -> Array:
    return np.array([value], "f4")


def test_a_step_becomes_one_block_named_by_its_first_record() -> None:
    scribe = Scribe()
    scribe.say(Declare(0, (), (), 0))
    scribe.part({"a": one(1)}, 7, step=9, time=2.0)
    scribe.part({"b": one(2)}, 7, step=9, time=3.0, inline=True)
    scribe.say(Drop(1, 7, 9, 4.0, ("c",), 100, "full"))
    folded = fold(scribe.pieces)
    (block,) = folded.blocks
    assert (block.ref, block.block) == (StepRef(ModeKeys.TRAIN, 7, 9), 1)
    assert (block.began, block.time, block.closed) == (2.0, 4.0, False)
    assert names(block) == ["a", "b"]
    assert (folded.first, folded.upto, folded.nbytes) == (0, 4, 16)
    assert folded.dropped[0].names == ("c",)
    assert folded.dropped[0].step == 9


def test_interleaved_steps_and_modes_stay_apart() -> None:
    scribe = Scribe()
    scribe.part({"a": one(1)}, 0)
    scribe.part({"a": one(2)}, 0, mode=ModeKeys.EVAL)
    scribe.part({"b": one(3)}, 0)
    scribe.close(0, mode=ModeKeys.EVAL)
    train, evaluated = fold(scribe.pieces).blocks
    assert (names(train), train.closed, train.block) == (["a", "b"], False, 0)
    assert (names(evaluated), evaluated.closed, evaluated.block) == (["a"], True, 1)


def test_last_of_equal_names_wins_and_empty_parts_are_removed() -> None:
    scribe = Scribe()
    scribe.part({"a": one(1)}, 0)
    scribe.part({"a": one(2), "b": one(3)}, 0)
    (block,) = fold(scribe.pieces).blocks
    assert names(block) == ["a", "b"]
    assert len(block.sources) == 1


def test_close_alone_makes_an_empty_block_drop_alone_none() -> None:
    scribe = Scribe()
    scribe.say(Drop(1, 3, 3, 0.0, ("c",), 100, "full"))
    scribe.close(4)
    (block,) = fold(scribe.pieces).blocks
    assert (block.ref.mode_step, block.closed, block.sources, block.block) == (4, True, (), 1)


def test_records_without_a_step() -> None:
    scribe = Scribe()
    scribe.say(Describe("k", b"old"))
    scribe.say(Trouble("oops", 3, 0.0))
    scribe.say(Describe("k", b"new"))
    quiet = fold(scribe.pieces)
    assert (quiet.flush, quiet.end) == (False, None)
    scribe.say(Flush())
    scribe.say(End("", 5.0))
    folded = fold(scribe.pieces)
    assert [d.data for d in folded.described] == [b"new"]
    assert folded.troubles == ("oops",)
    assert (folded.flush, folded.end) == (True, End("", 5.0))
    assert folded.blocks == ()


def test_a_part_without_declaration_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no declaration"):
        fold([Piece(5, Part(1, 0, 0, 0.0, 0, 0, 0, 0), None)])


# -- the law: wherever the journal is cut, a reader finds the same ------------------------------

Story = list[tuple[str, int, int, int]]
stories = st.lists(
    st.tuples(
        st.sampled_from(["part", "inline", "both", "close"]),
        st.integers(1, 2),  # mode
        st.integers(0, 2),  # step
        st.integers(0, 3),  # tensor
    ),
    min_size=1,
    max_size=20,
)


def tell(story: Story) -> Scribe:
    scribe = Scribe()
    for value, (what, mode, step, tensor) in enumerate(story):
        key = ModeKeys(mode)
        if what == "close":
            scribe.close(step, mode=key)
            continue
        tensors = {f"t{tensor}": np.array([value], ["f4", "i8", "u1", "f2"][value % 4])}
        if what == "both":
            tensors["shared"] = np.arange(value, dtype="i2")
        scribe.part(tensors, step, mode=key, inline=what == "inline")
    return scribe


SESSION = Session("me", 0, 1, 0, "all", 0.0, "host", 1, "")
View = dict[tuple[int, int], dict[str, tuple[str, bytes]]]


def seen_by_reader(scribe: Scribe, ranges: list[list[Piece]]) -> tuple[View, set[tuple[int, int]]]:
    """Compose every range into a segment and read all of it back, as a trial would."""
    view: View = {}
    closed = set()
    stored = []
    for pieces in ranges:
        blocks = fold(pieces).blocks
        segment = compose(blocks, scribe.read, key="s", run_id="", session=SESSION, seq=0)
        data = b"".join(segment.chunks)
        assert len(data) == segment.nbytes
        stored += [(entry, segment.layouts.get(entry.layout), data) for entry in segment.entries]
    assert len({entry.block for entry, _, _ in stored}) == len(stored)
    for entry, layout, data in sorted(stored, key=lambda item: item[0].block):
        key = (entry.mode, entry.mode_step)
        if entry.closed:
            closed.add(key)
        if layout is None:
            continue
        for name, tensor in entries_by_name(layout).items():
            spans = tensor_ranges(layout, tensor)
            assert spans is not None
            raw, crc = (data[slice(*span.shifted(entry.offset))] for span in spans)
            value = read_tensor(
                tensor, raw, crc, ObjectLocation("", "s"), checksum_seed("me", entry)
            )
            view.setdefault(key, {})[name] = (str(value.dtype), value.tobytes())
    return view, closed


@given(stories, st.data())
def test_result_does_not_depend_on_journal_cuts(story: Story, data: st.DataObject) -> None:
    scribe = tell(story)
    whole = seen_by_reader(scribe, [scribe.pieces])
    cuts = data.draw(st.lists(st.integers(1, len(scribe.pieces)), max_size=4))
    edges = sorted({0, len(scribe.pieces), *cuts})
    ranges = [scribe.pieces[a:b] for a, b in itertools.pairwise(edges)]
    assert seen_by_reader(scribe, ranges) == whole
    expected: View = {}
    for value, (what, mode, step, tensor) in enumerate(story):
        if what != "close":
            dtype = ["f4", "i8", "u1", "f2"][value % 4]
            into = expected.setdefault((mode, step), {})
            into[f"t{tensor}"] = (np.dtype(dtype).name, np.array([value], dtype).tobytes())
            if what == "both":
                into["shared"] = ("int16", np.arange(value, dtype="i2").tobytes())
    assert whole[0] == expected
