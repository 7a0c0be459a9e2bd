from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from smdist.format.layout import Layout, PlacementRequest, arrange


def wish(
    name: str, itemsize: int = 4, count: int = 3, raw: bool = True, reduced: bool = False
) -> PlacementRequest:
    dtype = {8: "F64", 4: "F32", 2: "F16", 1: "U8"}[itemsize]
    return PlacementRequest(name, dtype, itemsize, (count,), itemsize * count, raw, reduced, ())


wishes = st.lists(
    st.builds(
        wish,
        name=st.just("x"),
        itemsize=st.sampled_from([8, 4, 2, 1]),
        count=st.integers(0, 9),
        raw=st.booleans(),
        reduced=st.booleans(),
    ),
    max_size=12,
)


@given(wishes)
def test_tensors_are_aligned_without_overlap_or_gaps(wanted: list[PlacementRequest]) -> None:
    layout = arrange(wanted, ("sum", "max"))
    spans = [(e.offset, e.offset + e.nbytes) for e in layout.tensors if e.offset >= 0]
    for entry, asked in zip(layout.tensors, wanted, strict=True):
        assert (entry.offset >= 0, entry.row >= 0) == (asked.raw, asked.reduced)
        assert entry.offset < 0 or entry.offset % asked.itemsize == 0
    if layout.rows:
        spans.append((layout.statistics_offset, layout.statistics_nbytes))
    if layout.checksums_offset >= 0:
        assert layout.checksums_offset % 4 == 0
        spans.append((layout.checksums_offset, layout.checksums_offset + layout.checksums_nbytes))
    at = 0
    for start, stop in sorted(spans):
        assert start == at
        at = stop
    assert layout.nbytes % 8 == 0
    assert 0 <= layout.nbytes - at < 8


@given(wishes)
def test_rows_are_numbered_in_order_of_capture(wanted: list[PlacementRequest]) -> None:
    layout = arrange(wanted, ("sum",))
    assert [e.row for e in layout.tensors if e.row >= 0] == list(range(layout.rows))
    assert [e.order for e in layout.tensors] == list(range(len(wanted)))


@given(wishes)
def test_layouts_round_trip_and_equal_ones_share_a_digest(
    wanted: list[PlacementRequest],
) -> None:
    layout = arrange(wanted, ("sum",))
    again = Layout.from_json(layout.to_json(), layout.digest(), "k")
    assert again == layout
    assert again.digest() == arrange(list(wanted), ("sum",)).digest()


def test_a_different_name_is_a_different_layout() -> None:
    assert arrange([wish("a")], ()).digest() != arrange([wish("b")], ()).digest()


def test_shape_only_layouts_have_no_bytes() -> None:
    layout = arrange([wish("a", raw=False)], ("sum",))
    assert (layout.nbytes, layout.checksums_offset, layout.columns) == (0, -1, ())
    assert layout.tensors[0].shape == (3,)


def test_unknown_fields_are_ignored() -> None:
    text = arrange([wish("a")], ()).to_json()[:-1] + b',"novelty":1}'
    digest = hashlib.blake2b(text, digest_size=12).hexdigest()
    assert Layout.from_json(text, digest, "k").tensors[0].name == "a"
