"""Which spans are written, and which are read: exactly what is asked for, and few of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smdist.format.manifest_spans import SPAN_LENGTHS, ManifestSpan, covering_spans, spans_ending_at

numbers = st.integers(0, 3 * SPAN_LENGTHS[0])


def seqs_of(spans: list[ManifestSpan]) -> list[int]:
    return [seq for span in spans for seq in range(*span)]


@given(numbers, numbers)
def test_cover_is_exact_ordered_and_short(one: int, other: int) -> None:
    first, upto = sorted((one, other))
    spans = covering_spans(range(first, upto))
    assert seqs_of(spans) == list(range(first, upto))
    for span in spans:
        assert span.length == 1 or (span.length in SPAN_LENGTHS and span.first % span.length == 0)
    # Up to 15 of each length before the longest ones, and as many after them.
    assert len(spans) <= (upto - first) // SPAN_LENGTHS[0] + 2 * 15 * len(SPAN_LENGTHS)


@given(numbers)
def test_every_covering_span_was_written(count: int) -> None:
    spans = covering_spans(range(count))
    digits = count // 4096 + count % 4096 // 256 + count % 256 // 16 + count % 16
    assert len(spans) == digits
    for span in spans:
        assert span.length == 1 or spans_ending_at(span.upto)[0] == span


@given(st.sets(st.integers(0, 600)))
def test_spans_exclude_missing_manifests(seqs: set[int]) -> None:
    assert seqs_of(covering_spans(seqs)) == sorted(seqs)


@given(numbers)
def test_spans_to_write_end_with_the_newest_manifest(count: int) -> None:
    spans = spans_ending_at(count)
    assert len(spans) == sum(count % length == 0 for length in SPAN_LENGTHS if count)
    assert all(span.upto == count and span.length in SPAN_LENGTHS for span in spans)
    assert spans == sorted(spans, key=lambda span: -span.length)
    assert bool(spans) is (count > 0 and count % 16 == 0), "one put for every 16 manifests"


@given(st.integers(0, 40), st.sampled_from(SPAN_LENGTHS))
def test_children_of_a_span_were_written_before_it(number: int, length: int) -> None:
    span = ManifestSpan(number * length, (number + 1) * length)
    parts = span.children()
    assert seqs_of(parts) == list(range(*span))
    assert {part.length for part in parts} == {length // 16}
    for part in parts[:-1]:
        assert part.length == 1 or part in spans_ending_at(part.upto)
