"""Is a run whole? Told from its files, and held against what the ranks wrote down themselves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import google_crc32c
import msgspec
import numpy as np
from safetensors import safe_open

from smdist.format.block import ObjectLocation, checksum_seed, crc32c, read_tensor, tensor_ranges
from smdist.format.inline_segment import extract_segment
from smdist.format.layout import Layout
from smdist.format.manifest import RankManifest, layout_key
from smdist.identity import modes
from smdist.trials import Trial
from tests.faults.launcher import Noted, Started
from tests.support.spans import assert_spans_agree

TRAIN = modes.TRAIN


class Saved(NamedTuple):
    """A tensor of a rank in the store."""

    attempt: int
    rank: int
    mode: int
    mode_step: int
    name: str


def audit(out_dir: Path) -> dict[Saved, int]:
    """Everything in the store with its checksum; fails on whatever is torn, doubled or unnamed."""
    found: dict[Saved, int] = {}
    named: set[str] = set()
    for worker in sorted((out_dir / "manifests").glob("*")):
        sessions: dict[int, list[RankManifest]] = {}
        for path in sorted(worker.iterdir()):
            manifest = msgspec.json.decode(path.read_bytes(), type=RankManifest)
            sessions.setdefault(manifest.attempt, []).append(manifest)
        for manifests in sessions.values():
            _chain(manifests)
            for manifest in manifests:
                data = _entries(out_dir, manifest, found)
                named.update(data)
    stored = {str(path.relative_to(out_dir)) for path in out_dir.glob("segments/*/*")}
    assert stored == named, (
        f"segments {stored - named} without and {named - stored} with a manifest"
    )
    for segment in stored:
        opens_elsewhere(out_dir / segment)
    assert_spans_agree(out_dir)
    return found


def _chain(manifests: list[RankManifest]) -> None:
    upto = 0
    for seq, manifest in enumerate(manifests):
        assert (manifest.seq, manifest.first) == (seq, upto), f"gap or overlap: {manifest}"
        assert manifest.session == manifests[0].session
        final = seq == len(manifests) - 1
        assert (manifest.state == "active") is not final, f"ends not once: {manifest}"
        upto = manifest.upto


def _entries(out_dir: Path, manifest: RankManifest, found: dict[Saved, int]) -> set[str]:
    """The segments that a manifest names, without what it carries itself."""
    settled, attached = extract_segment("attached", manifest)
    named = {entry.segment for entry in settled.steps} - {"", "attached"}
    content = {segment: (out_dir / segment).read_bytes() for segment in named}
    content["attached"] = attached
    for entry in settled.steps:
        assert manifest.first <= entry.block < manifest.upto
        if not entry.segment:
            continue
        key = layout_key(entry.layout)
        layout = Layout.from_json((out_dir / key).read_bytes(), entry.layout, key)
        data = content[entry.segment]
        for tensor in layout.tensors:
            spans = tensor_ranges(layout, tensor)
            assert spans is not None
            raw, checksum = (
                data[s.start : s.stop] for s in (x.shifted(entry.offset) for x in spans)
            )
            of_block = checksum_seed(manifest.session, entry)
            read_tensor(
                tensor, raw, checksum, ObjectLocation(str(out_dir), entry.segment), of_block
            )
            saved = Saved(manifest.attempt, manifest.rank, entry.mode, entry.mode_step, tensor.name)
            assert saved not in found, f"stored twice: {saved}"
            found[saved] = crc32c(raw)
    return named


MODES = {"train": 1, "eval": 2, "predict": 3, "global": 4}


def opens_elsewhere(segment: Path) -> None:
    """The official reader opens it, and every checksum in it fits; nothing of smdist is used."""
    with safe_open(segment, framework="numpy") as opened:
        names = list(opened.keys())
        assert names, segment
        about = opened.metadata()
        layouts, blocks = json.loads(about["layouts"]), json.loads(about["blocks"])
        for digest_name in [name for name in names if name.endswith("/.crc32c")]:
            prefix = digest_name.removesuffix("/.crc32c")
            hidden = (digest_name, f"{prefix}/.padding")
            inside = [n for n in names if n.startswith(f"{prefix}/") and n not in hidden]
            mode, mode_step = prefix.split(".")[0].split("/")
            what = (
                f"{about['session']}/{MODES[mode]}/{mode_step}/{blocks[prefix]}/{layouts[prefix]}/"
            )
            sums = [
                google_crc32c.value(
                    (what + name.removeprefix(f"{prefix}/")).encode()
                    + np.ascontiguousarray(opened.get_tensor(name)).tobytes()
                )
                for name in inside
            ]
            # The order is that of the layout; 0 stands for what is not there.
            expected = sorted(int(crc) for crc in opened.get_tensor(digest_name) if crc)
            assert sorted(sums) == expected, f"{segment}: {prefix}"


def assert_in_run(trial: Trial, started: Started, rank: int, evidence: list[Noted]) -> None:
    """Every value that was captured is in the trial, the same to the bit."""
    values = trial.values(workers=[rank], mode=TRAIN) if evidence else {}
    for step, checksum, name in evidence:
        where = f"{name} of worker_{rank} at step {step}; {started!r}"
        value = values.get(name, {}).get(step, {}).get(f"worker_{rank}")
        assert value is not None, f"lost: {where}"
        assert crc32c(value.tobytes()) == checksum, f"wrong: {where}"


def unexplained(found: Iterable[Saved], rank: int, evidence: Iterable[Noted]) -> set[Saved]:
    """What the store has of a rank beyond its evidence."""
    noted = {(one.step, one.name) for one in evidence}
    return {one for one in found if one.rank == rank and (one.mode_step, one.name) not in noted}
