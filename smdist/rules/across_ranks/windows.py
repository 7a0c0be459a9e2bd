"""Statistics over windows of steps. NaN stands for what is not known."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from smdist.rules.across_ranks.panels import Array

__all__ = ["in_some_of_last", "median_of_last", "nan_median", "successive"]

_CHUNK = 4096  # windows at a time: the median copies them


def nan_median(values: Array, axis: int) -> Array:
    """Return the median of what is not NaN; NaN where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "All-NaN slice"
        return np.asarray(np.nanmedian(values, axis=axis))


def median_of_last(values: Array, length: int, *, least: int = 1) -> tuple[Array, Array]:
    """Return median and median deviation of the `length` values before each, itself left out.

    NaN where fewer than `least` are known.
    """
    padded = np.concatenate([np.full(length, np.nan), values[:-1]]) if len(values) else values
    if not len(values):
        return values, values
    windows = sliding_window_view(padded, length)
    centre, spread = np.full(len(values), np.nan), np.full(len(values), np.nan)
    for start in range(0, len(values), _CHUNK):
        part = windows[start : start + _CHUNK]
        middle = nan_median(part, 1)
        middle[np.isfinite(part).sum(axis=1) < least] = np.nan
        centre[start : start + _CHUNK] = middle
        spread[start : start + _CHUNK] = nan_median(np.abs(part - middle[:, None]), 1)
    return centre, spread


def in_some_of_last(flags: Array, some: int, last: int) -> Array:
    """Return the first cell of each case where `some` of `last` successive rows are set.

    A cell is set in the result if it is set itself and enough of the rows that follow are set too.
    """
    padded = np.concatenate([flags, np.zeros((last - 1, *flags.shape[1:]), np.bool_)])
    counts = sliding_window_view(padded, last, axis=0).sum(axis=-1)
    return np.asarray(flags & (counts >= some))


def successive(flags: Array, length: int) -> Array:
    """Return the cells at which a series of `length` set rows begins."""
    return in_some_of_last(flags, length, length)
