"""Reads many manifests of a rank in few requests, by the spans that hold them.

A span counts only if it is whole and of the session that its reader knows; where it is missing, its
parts are asked for, and at last the manifests. Whoever reads knows by a listing that each of the manifests is
there: what was removed does not come back by a span.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from smdist.concurrency import bounded_gather
from smdist.format.manifest import RankManifest
from smdist.format.manifest_spans import ManifestSpan

__all__ = ["read_in_order"]

_AT_ONCE = 16  # objects of a rank
_MOST_AT_ONCE = 256  # manifests in them, if it is more than one object


async def read_in_order(
    spans: Iterable[ManifestSpan],
    read: Callable[[ManifestSpan], Awaitable[Sequence[RankManifest] | None]],
    take: Callable[[Sequence[RankManifest]], bool],
) -> None:
    """Pass the manifests of `spans` to `take` until it returns False or one is missing."""
    todo = deque(spans)
    got: dict[ManifestSpan, Sequence[RankManifest] | None] = {}
    while todo:
        asked = [span for span in _first(todo) if span not in got]
        got.update(zip(asked, await bounded_gather(read, asked, _AT_ONCE), strict=True))
        while todo and todo[0] in got:
            span = todo.popleft()
            manifests = got.pop(span)
            if manifests is not None:
                if not take(manifests):
                    return
            elif span.length > 1:
                todo.extendleft(reversed(span.children()))
            else:
                return


def _first(todo: Iterable[ManifestSpan]) -> list[ManifestSpan]:
    found: list[ManifestSpan] = []
    for span in todo:
        if found and (len(found) == _AT_ONCE or span.upto - found[0].first > _MOST_AT_ONCE):
            break
        found.append(span)
    return found
