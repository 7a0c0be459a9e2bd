"""Does a bucket hold what a rank saved: all of it, once, whole and right?

Everything is judged by what the plan says a value is and by what the rank noted itself. What is
read here are the objects as files; nothing goes through the store of smdist.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from smdist.format.block import (
    ObjectLocation,
    checksum_seed,
    crc32c,
    read_statistics,
    read_tensor,
    statistics_ranges,
    statistics_row,
    tensor_ranges,
)
from smdist.format.inline_segment import extract_segment
from smdist.format.layout import Layout
from smdist.format.manifest import RankManifest, RankSummary, StepEntry, layout_key, manifest_key
from smdist.kernel.tensor_stats import derive
from tests.faults.audit import opens_elsewhere
from tests.faults.launcher import Noted
from tests.faults.schedule_plan import CLOSE, Plan, value
from tests.support.spans import assert_spans_agree

__all__ = ["Told", "audit"]

WORKER = "worker_0"


class Told(NamedTuple):
    """What the rank wrote down."""

    captured: list[Noted]
    marks: list[str]

    def steps(self, word: str) -> set[int]:
        found = {int(m.split()[1]) for m in self.marks if m.startswith(f"{word} ")}
        return found - {-1}


class _Run:
    """The objects below one prefix."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.places = {
            plan.name(kind, i): (kind, i)
            for kind, saved in enumerate(plan.kinds)
            for i in range(len(saved))
        }
        self.stored: Counter[tuple[int, str]] = Counter()
        self.closed: Counter[int] = Counter()
        self.segments: set[str] = set()

    def keys(self, prefix: str) -> list[str]:
        found = (self.folder / prefix).rglob("*")
        return sorted(str(p.relative_to(self.folder)) for p in found if p.is_file())

    def read(self, key: str) -> bytes:
        return (self.folder / key).read_bytes()


def audit(folder: Path, plan: Plan, told: Told) -> None:
    """Fails on whatever is torn, lost, doubled, wrong, unnamed or unfinished."""
    run = _Run(folder, plan)
    manifests = _chain(run)
    for manifest in manifests:
        _manifest(run, manifest)
    assert set(run.keys("segments")) == run.segments, "segments that no manifest names"
    for key in run.segments:
        opens_elsewhere(folder / key)
    _completeness(run, told)
    _ending(manifests[-1], plan, told)
    _summary(run, manifests)
    assert_spans_agree(folder)


def _chain(run: _Run) -> list[RankManifest]:
    keys = run.keys("manifests")
    manifests = [msgspec.json.decode(run.read(key), type=RankManifest) for key in keys]
    assert manifests, "no manifest at all"
    upto = 0
    for seq, (key, manifest) in enumerate(zip(keys, manifests, strict=True)):
        assert key == manifest_key(WORKER, 0, seq), f"a gap before {key}"
        assert (manifest.seq, manifest.first) == (seq, upto), f"gap or overlap: {manifest}"
        assert (manifest.state == "active") is (seq < len(keys) - 1), f"ends not once: {manifest}"
        assert not manifest.troubles
        assert not manifest.dropped
        upto = manifest.upto
    return manifests


def _manifest(run: _Run, manifest: RankManifest) -> None:
    settled, attached = extract_segment(manifest_key(WORKER, 0, manifest.seq), manifest)
    blocks = [entry.block for entry in settled.steps]
    assert len(set(blocks)) == len(blocks), "one block twice"
    for entry in settled.steps:
        assert manifest.first <= entry.block < manifest.upto
        run.closed[entry.step] += entry.closed
        if entry.layout:
            data = attached
            if not attached and entry.segment:
                run.segments.add(entry.segment)
                data = run.read(entry.segment)
            _block(run, entry, data, checksum_seed(manifest.session, entry))


def _block(run: _Run, entry: StepEntry, data: bytes, of_block: int) -> None:
    key = layout_key(entry.layout)
    layout = Layout.from_json(run.read(key), entry.layout, key)
    place = ObjectLocation(str(run.folder), entry.segment)
    statistics = None
    if spans := statistics_ranges(layout):
        raw, checksum = (data[s.start : s.stop] for s in (x.shifted(entry.offset) for x in spans))
        statistics = read_statistics(layout, raw, checksum, place, of_block)
    for tensor in layout.tensors:
        kind, index = run.places[tensor.name]
        saved, right = run.plan.kinds[kind][index], value(run.plan, entry.step, kind, index)
        where = f"{tensor.name} of step {entry.step}"
        assert kind in run.plan.steps[entry.step], where
        spans = tensor_ranges(layout, tensor)
        assert (spans is not None) is saved.raw, where
        if spans is not None:
            raw, checksum = (
                data[s.start : s.stop] for s in (x.shifted(entry.offset) for x in spans)
            )
            found = read_tensor(tensor, raw, checksum, place, of_block)
            np.testing.assert_array_equal(found, right, err_msg=where)
        measured = None if statistics is None else statistics_row(layout, tensor, statistics)
        assert (measured is not None) is saved.reduced, where
        if measured is not None:
            columns, row = measured
            assert derive(row, columns, "min") == right.min(), where
            assert derive(row, columns, "max") == right.max(), where
            mean = float(right.mean(dtype=np.float64))
            np.testing.assert_allclose(derive(row, columns, "mean"), mean, rtol=1e-9, atol=1e-9)
        run.stored[entry.step, tensor.name] += 1


def _completeness(run: _Run, told: Told) -> None:
    plan = run.plan
    twice = [what for what, times in run.stored.items() if times != 1]
    assert not twice, f"stored twice: {twice}"
    for step, checksum, name in told.captured:
        assert (step, name) in run.stored, f"lost: {name} of step {step}"
        assert crc32c(value(plan, step, *run.places[name]).tobytes()) == checksum
    assert not told.steps("dropped")
    assert max(run.closed.values(), default=0) <= 1, f"closed twice: {run.closed}"
    closed = {step for step, times in run.closed.items() if times}
    assert told.steps("closed") <= closed, f"closed, and open in the store: {told.marks}"
    assert closed <= told.steps("closing"), f"closed by nobody: {closed}"
    for step in closed:  # whole: with everything that was captured before it was closed
        kinds = plan.steps[step]
        kinds = kinds[: kinds.index(CLOSE)] if CLOSE in kinds else kinds
        for name, (kind, _) in run.places.items():
            assert kind not in kinds or (step, name) in run.stored, f"torn: {name} of step {step}"


def _ending(last: RankManifest, plan: Plan, told: Told) -> None:
    if "ended" in told.marks:
        assert last.state == "ended"
    if "ending" not in told.marks:
        assert last.state == "lost"
    if last.state == "ended":
        assert bool(last.reason) is (plan.ends == "error")


def _summary(run: _Run, manifests: list[RankManifest]) -> None:
    for key in run.keys("summaries"):
        summary = msgspec.json.decode(run.read(key), type=RankSummary)
        assert summary.is_consistent
        assert list(summary.manifests) == manifests, "a summary that says something else"
