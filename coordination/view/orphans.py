"""Ranks that have stored something and whose session is gone: nobody finds them by listing sessions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import islice

from smdist.identity import worker_name
from smdist.storage.store import Store

__all__ = ["Owner", "find_orphans", "manifest_owner"]

Owner = tuple[int, int]
"""Attempt and rank."""

_MANIFEST = re.compile(r"manifests/worker_(\d+)/(\d+)-(\d+)\.json")
_FEW = 16


def manifest_owner(key: str) -> Owner | None:
    """Whose manifest it is."""
    match = _MANIFEST.fullmatch(key)
    return (int(match[2]), int(match[1])) if match else None


async def find_orphans(
    store: Store, known: Collection[Owner], expected: Iterable[Owner]
) -> set[Owner]:
    """Those that are `expected` besides the `known` ones; all there are if none is known.

    Few requests: a rank that has not started yet has no manifests.
    """
    # No more of them than it takes to decide: a world may be said to be of any size.
    absent = [*islice((owner for owner in expected if owner not in known), _FEW + 1)]
    if not known or len(absent) > _FEW:
        keys = [*await store.list("manifests/")]
    else:
        keys = []
        for attempt, rank in absent:
            keys += await store.list(f"manifests/{worker_name(rank)}/{attempt:06d}-")
    found = {owner for key in keys if (owner := manifest_owner(key)) is not None}
    return found.difference(known)
