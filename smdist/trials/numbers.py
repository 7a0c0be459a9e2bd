"""Numbers that travelled in manifests, read by the session: one request instead of one per manifest.

A merged snapshot says in which manifest a number lies; a rank that has ended has left a summary with
all of them. A rank that lives has none yet, and a long session keeps its numbers where they were:
their manifests are read then.
"""

from __future__ import annotations

import re

import msgspec

from smdist.errors import ObjectNotFound
from smdist.manifest import RankSummary, manifest_key, summary_key
from smdist.storage.base import Store

__all__ = ["Numbers", "summary_of"]

_MANIFEST = re.compile(r"manifests/(worker_\d+)/(\d+)-\d+\.json")


def summary_of(key: str) -> str:
    """The summary in which the content of a manifest may be; empty for what is no manifest."""
    match = _MANIFEST.fullmatch(key)
    return summary_key(match[1], int(match[2])) if match else ""


class Numbers:
    """On the event loop that owns the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of_no_use: set[str] = set()

    async def load(self, summary: str) -> dict[str, bytes]:
        """By the key of the manifest, what it carried. Empty when there is no such summary."""
        if summary in self._of_no_use:
            return {}
        try:
            data = await self._store.get(summary)
            manifests = msgspec.json.decode(data, type=RankSummary).manifests
        except (ObjectNotFound, msgspec.DecodeError):
            manifests = ()
        found = {manifest_key(m.worker, m.attempt, m.seq): m.attached for m in manifests}
        found = {key: attached for key, attached in found.items() if attached}
        if not found:
            self._of_no_use.add(summary)
        return found
