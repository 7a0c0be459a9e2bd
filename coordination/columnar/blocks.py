"""The blocks of one step of one rank, joined.

Facts of one block never differ in a healthy run. When they do, the greater one wins in an order
that only looks at the facts, so joining is commutative, associative and idempotent.
"""

from __future__ import annotations

import msgspec

from smdist.format.manifest import StepEntry
from smdist.identity import ModeKeys

__all__ = ["Blocks", "StepKey", "greater_entry", "join_blocks", "step_number", "with_entry"]

StepKey = tuple[int, int]
"""`(mode, mode_step)`: what a step is, within an attempt."""

Blocks = tuple[StepEntry, ...]

_GLOBAL = ModeKeys.GLOBAL.value


def step_number(entry: StepEntry) -> int:
    """Return the number under which users of its mode know the step."""
    return entry.step if entry.mode == _GLOBAL else entry.mode_step


def greater_entry(a: StepEntry, b: StepEntry) -> StepEntry:
    if a == b:
        return a
    return max(a, b, key=lambda entry: (entry.closed, msgspec.msgpack.encode(entry)))


def with_entry(blocks: Blocks, entry: StepEntry) -> Blocks:
    """Return `blocks` with one more, in order of their number; a number occurs once."""
    if not blocks or blocks[-1].block < entry.block:
        return (*blocks, entry)
    by_number = {old.block: old for old in blocks}
    old = by_number.get(entry.block)
    by_number[entry.block] = entry if old is None else greater_entry(old, entry)
    return tuple(by_number[number] for number in sorted(by_number))


def join_blocks(a: Blocks, b: Blocks) -> Blocks:
    if not a or not b:
        return a or b
    for entry in b:
        a = with_entry(a, entry)
    return a
