"""Read many manifests of a rank in order, by the spans that hold them.

Called by the coordinator's poller. If a span is missing or belongs to another session, the shorter spans
in it are read, and finally the manifests. The caller knows from a listing that each manifest exists: a
span must not bring back what was removed.
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
