"""Which ranks agree: the sizes of groups of equal values at each step, and who is in the minority."""

from __future__ import annotations

import numpy as np

from smdist.rules.across_ranks.panels import Array

__all__ = ["differing_steps", "group_sizes", "minority", "sentence_of_ranks"]


def differing_steps(values: Array, present: Array) -> Array:
    """Return which rows hold at least two different values among those present."""
    first = np.argmax(present, axis=1)
    reference = np.take_along_axis(values, first[:, None], axis=1)
    return np.asarray(((values != reference) & present).any(axis=1))


def group_sizes(values: Array, present: Array) -> Array:
    """Return for each cell how many of its row have the same value; 0 where it is missing."""
    height, width = values.shape
    if not values.size:
        return np.zeros(values.shape, np.int64)
    # Missing cells come last, each in a group with other missing ones.
    order = np.lexsort((values, ~present), axis=-1)
    ordered = np.take_along_axis(values, order, axis=1)
    there = np.take_along_axis(present, order, axis=1)
    begins = np.ones((height, width), np.bool_)
    begins[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]) | (there[:, 1:] != there[:, :-1])
    group = np.cumsum(begins.ravel()) - 1
    sizes = np.bincount(group)[group].reshape(height, width)
    result = np.zeros((height, width), np.int64)
    np.put_along_axis(result, order, np.where(there, sizes, 0), axis=1)
    return result


def minority(values: Array, present: Array) -> Array:
    """Return the cells outside the majority of their row; all that differ where there is none.

    A majority is more than half of those present.
    """
    sizes = group_sizes(values, present)
    known = present.sum(axis=1, keepdims=True)
    return np.asarray(present & (sizes * 2 <= known))


def sentence_of_ranks(ranks: tuple[int, ...], most: int = 4) -> str:
    """Return `worker_1, worker_2 and 3 more`."""
    shown = [f"worker_{rank}" for rank in ranks[:most]]
    if len(ranks) > most:
        shown.append(f"{len(ranks) - most} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
