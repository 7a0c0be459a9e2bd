"""Reads many manifests of a rank in few requests, by the spans that hold them.

A span counts only if it is whole and of the session that its reader knows; where it is missing, its
parts are asked for, and at last the manifests. Whoever reads knows by a listing that each of the manifests is
there: what was removed does not come back by a span.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from smdist.coordination.view.vetting import of_session
from smdist.errors import CorruptObject
from smdist.format.manifest import RankManifest, RankSpan, span_key
from smdist.format.manifest_spans import ManifestSpan
from smdist.identity import worker_name

__all__ = ["SpanRequest", "all_of", "read_in_order"]

T = TypeVar("T")

_AT_ONCE = 16  # objects of a rank
_MOST_AT_ONCE = 256  # manifests in them, if it is more than one object


class SpanRequest(NamedTuple):
    """Manifests of one session."""

    attempt: int
    rank: int
    session: str
    span: ManifestSpan

    @property
    def key(self) -> str:
        return span_key(worker_name(self.rank), self.attempt, *self.span)

    def found(self, made: RankSpan, url: str) -> tuple[RankManifest, ...] | None:
        """What lies under `key` says; None if it was taken back, CorruptObject if it is another's."""
        for one in made.manifests:
            of_session(one, self.session, self.key, url)
        named = [(self.attempt, self.rank, seq) for seq in range(*self.span)]
        if made.manifests and [(m.attempt, m.rank, m.seq) for m in made.manifests] != named:
            raise CorruptObject(url, self.key, "read", "it has not the manifests of its name")
        return made.manifests or None

    def children(self) -> list[SpanRequest]:
        return [self._replace(span=part) for part in self.span.children()]


async def read_in_order(
    spans: Iterable[ManifestSpan],
    read: Callable[[ManifestSpan], Awaitable[Sequence[RankManifest] | None]],
    take: Callable[[Sequence[RankManifest]], bool],
) -> None:
    """Hand on what `spans` hold until `take` has enough, or a single manifest is None."""
    todo = deque(spans)
    got: dict[ManifestSpan, Sequence[RankManifest] | None] = {}
    while todo:
        asked = [span for span in _first(todo) if span not in got]
        got.update(zip(asked, await all_of(map(read, asked)), strict=True))
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


async def all_of(reads: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; when one fails, after all have ended."""
    found: list[T] = []
    for result in await asyncio.gather(*reads, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
