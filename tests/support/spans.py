"""Spans of manifests in tests: written as an uploader does, and held against the manifests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from smdist.format.inline_segment import extract_segment
from smdist.format.manifest import RankManifest, RankSpan, manifest_key
from smdist.storage import MemoryStore
from smdist.storage import loop_thread as sync
from smdist.workers.upload.summaries import Summary
from tests.support.run_builder import RankWriter

__all__ = ["Roller", "assert_spans_agree", "without_spans"]


class Roller:
    """Beside a rank's writer: call `roll` after what it has flushed."""

    def __init__(self, writer: RankWriter) -> None:
        self._writer, self._told = writer, 0
        self._summary = Summary(writer.session)

    def restart(self) -> None:
        """Another uploader, which does not know what the one before has put."""
        self._summary = Summary(self._writer.session)

    def roll(self) -> None:
        writer = self._writer
        store, attempt = writer.store, writer.session.attempt
        for seq in range(self._told, writer.seq):
            data = sync.run(store.get(manifest_key(writer.worker, attempt, seq)))
            self._summary.note(msgspec.json.decode(data, type=RankManifest))
            made = self._summary.span(seq + 1)
            if made is not None:
                sync.run(store.put(made.key, (made.data,)))
        self._told = writer.seq


def without_spans(store: MemoryStore) -> MemoryStore:
    bare = MemoryStore()
    bare.objects = {k: v for k, v in store.objects.items() if not k.startswith("spans/")}
    return bare


def assert_spans_agree(folder: Path) -> Sequence[str]:
    """Every span below `folder` says what the manifests there say; the names of all."""
    found = []
    for path in sorted(folder.glob("spans/*/*.json")):
        attempt, first, upto = path.stem.split("-")
        if not path.stat().st_size:
            continue  # taken back
        told = msgspec.json.decode(path.read_bytes(), type=RankSpan).manifests
        keys = [
            manifest_key(path.parent.name, int(attempt), seq)
            for seq in range(int(first), int(upto))
        ]
        stored = [
            msgspec.json.decode((folder / key).read_bytes(), type=RankManifest) for key in keys
        ]
        settled = [
            extract_segment(key, one).manifest for key, one in zip(keys, stored, strict=True)
        ]
        assert [
            extract_segment(key, one).manifest for key, one in zip(keys, told, strict=True)
        ] == settled
        found.append(path.name)
    return found
