"""What is overwritten in the capture buffer is dropped and told, whoever wrote over it.

A real capture and the uploader's own code; the test writes into the arena's file between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from smdist import kernel
from smdist.errors import SmdistError
from smdist.format.block import crc32c
from smdist.format.journal_records import Part, Piece, TensorSpec
from smdist.format.manifest import RUN_KEY, session_key
from smdist.format.stored_json import encode
from smdist.identity import ModeKeys, StepRef, worker_name
from smdist.planning import TensorPlan
from smdist.trials import Trial, create_trial
from smdist.workers.capture.capture import Capture, CaptureLimits
from smdist.workers.capture.part_plan import CaptureRequest, PartPlan, plan_part
from smdist.workers.capture.tensor_access import CopyHandle, NumpyAccess
from smdist.workers.spool.journal import JournalReader
from smdist.workers.spool.spool import Spool
from smdist.workers.upload.recover import recover
from tests.support.uploader_rig import Job, make_spool

Array = npt.NDArray[np.float32]

REASON = "overwritten in the capture buffer before being stored"
RAW = TensorPlan(raw=True, reductions=frozenset(), collections=())
BOTH = TensorPlan(raw=True, reductions=frozenset({"mean"}), collections=())
# A part is saved at once; "large" and "small" go the way of gradients once their kind is declared.
PARTS: dict[str, tuple[dict[str, tuple[int, ...]], TensorPlan]] = {
    "large": ({"large": (100_000,)}, RAW),
    "small": ({"small": (300,)}, RAW),
    "several": ({"odd": (7, 11), "empty": (0,), "medium": (5001,), "big": (200, 123)}, BOTH),
    "transposed": ({"transposed": (130, 127)}, RAW),
    "late": ({"late": (40_000,), "late too": (300,)}, BOTH),
    "last": ({"last": (2000,)}, RAW),
}
STEPS = 3


class TensorAccess(NumpyAccess):
    """Arrays of which some arrive later, as those of a device do."""

    def __init__(self, late: Sequence[Array]) -> None:
        self._late = {id(array) for array in late}

    def on_device(self, tensor: npt.NDArray[np.generic]) -> bool:
        return id(tensor) in self._late

    def address(self, tensor: npt.NDArray[np.generic]) -> int:
        return 0 if self.on_device(tensor) else super().address(tensor)

    def start_copy(self, tensor: npt.NDArray[np.generic], target: memoryview) -> CopyHandle:
        return lambda: self.write(tensor, target)

    def start_measure(
        self, tensor: npt.NDArray[np.generic], columns: Sequence[str], target: memoryview
    ) -> CopyHandle:
        def arrive() -> None:
            target[:] = np.full(len(columns), tensor.size, np.float64).tobytes()

        return arrive


def values_at(step: int) -> dict[str, Array]:
    random, values = np.random.default_rng(step), {}
    for shapes, _ in PARTS.values():
        for name, shape in shapes.items():
            array = random.standard_normal(shape).astype(np.float32)
            values[name] = array if name != "transposed" else np.asfortranarray(array)
    return values


def plan_of(part: str) -> PartPlan:
    shapes, plan = PARTS[part]
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in shapes.items()}
    return plan_part(
        [CaptureRequest(name, "F32", shapes[name], sizes[name], plan) for name in shapes]
    )


@pytest.fixture(params=["compiled", "numpy"] if kernel.compiled else ["numpy"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whose functions capture and upload."""
    if request.param == "numpy":
        for name in ("copy", "record", "guard", "statistics"):
            monkeypatch.setattr(kernel, name, getattr(kernel.NumpyKernel, name))
    return request.param  # type: ignore[no-any-return]


def enter(out: Path, spool: Spool) -> None:
    """What the rank says of itself at its start, so that a trial finds the run."""
    session = spool.info.session
    key = session_key(worker_name(session.rank), session.attempt)
    for name, told in ((RUN_KEY, spool.info.run), (key, session)):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(encode(told, name))


@pytest.fixture
def captured(chosen: str, tmp_path: Path) -> Spool:
    """A spool with all parts at every step, that nobody has uploaded."""
    job = Job(root=str(tmp_path / "spools"), out_dir=str(tmp_path / "out"))
    spool, plans = make_spool(job), {part: plan_of(part) for part in PARTS}
    enter(tmp_path / "out", spool)
    steps = [values_at(step) for step in range(STEPS)]
    late = [values[name] for values in steps for name in PARTS["late"][0]]
    capture = Capture(spool, TensorAccess(late), CaptureLimits(32 << 20), pytest.fail)
    try:
        for number, values in enumerate(steps):
            capture.begin(StepRef(ModeKeys.TRAIN, number, number))
            for part, (shapes, _) in PARTS.items():
                assert capture.save(plans[part], [values[name] for name in shapes])
        capture.end()
        assert capture._device.join(60)
    finally:
        capture.close()
    return spool


def pieces_of(spool: Spool) -> list[Piece]:
    journal = JournalReader(spool)
    try:
        return journal.read()
    finally:
        journal.close()


def overwrite(spool: Spool, part: str, step: int, harm: Callable[[Array, PartPlan], None]) -> None:
    """Change the bytes of a part where they lie."""
    plan = plan_of(part)
    (record,) = (
        piece.record
        for piece in pieces_of(spool)
        if isinstance(piece.record, Part)
        and piece.kind is not None
        and piece.record.step == step
        and piece.kind.tensors == plan.tensors
    )
    data: Any = np.memmap(
        spool.path / f"arena-{record.arena}", np.uint8, "r+", record.offset, plan.nbytes
    )
    harm(data, plan)
    data.flush()


def scribble(data: Any, start: int, nbytes: int) -> None:
    """Float32 like those that were there."""
    values = np.random.default_rng(99).standard_normal(nbytes // 4 + 1).astype(np.float32)
    data[start : start + nbytes] = values.view(np.uint8)[: len(data[start : start + nbytes])]


def everything(data: Any, plan: PartPlan) -> None:
    scribble(data, 0, plan.nbytes)


def front(data: Any, plan: PartPlan) -> None:
    scribble(data, 0, plan.nbytes // 2 // 64 * 64)


def edge(data: Any, plan: PartPlan) -> None:
    """As little as two ranges can have in common."""
    scribble(data, (plan.nbytes - 1) // 64 * 64, 64)


def piece_in_the_middle(data: Any, plan: PartPlan) -> None:
    scribble(data, plan.nbytes // 2 // 64 * 64, 4096)


def one_bit(data: Any, plan: PartPlan) -> None:
    data[plan.nbytes // 3] ^= 1


def one_statistic(data: Any, plan: PartPlan) -> None:
    assert plan.reduced
    data[: plan.stride].view(np.float64)[4] += 1.0


def page_of_zeros(data: Any, plan: PartPlan) -> None:
    """What a machine that lost power leaves of a page."""
    data[4096:8192] = 0


def check(trial: Trial, lost: dict[int, tuple[str, ...]]) -> None:
    """`lost` names were dropped, with the reason, and all others are as they were captured."""
    assert [(drop.step, drop.names) for drop in trial.dropped()] == list(lost.items())
    assert {drop.reason for drop in trial.dropped()} <= {REASON}
    assert trial.steps() == [step for step in range(STEPS) if step not in lost]
    assert len(trial.troubles().get("worker_0", [])) == len(lost)
    for step in range(STEPS):
        assert trial.missing(step) == ({0: "dropped"} if step in lost else {})
        for name, expected in values_at(step).items():
            if name in lost.get(step, ()):
                with pytest.raises(SmdistError):
                    trial.tensor(name).value(step)
            else:
                np.testing.assert_array_equal(trial.tensor(name).value(step), expected)


def test_what_nobody_overwrites_is_stored(captured: Spool, tmp_path: Path) -> None:
    parts = [piece for piece in pieces_of(captured) if isinstance(piece.record, Part)]
    assert len(parts) == STEPS * len(PARTS)
    recover(captured.path, pytest.fail)
    check(create_trial(tmp_path / "out"), {})


@pytest.mark.parametrize(
    ("part", "harm"),
    [
        ("large", everything),
        ("large", front),
        ("large", edge),
        ("large", piece_in_the_middle),
        ("large", page_of_zeros),
        ("small", one_bit),
        ("several", one_statistic),
        ("several", piece_in_the_middle),
        ("transposed", piece_in_the_middle),
        ("late", piece_in_the_middle),
    ],
)
def test_an_overwritten_part_is_dropped_and_the_others_are_stored(
    captured: Spool, tmp_path: Path, part: str, harm: Callable[[Array, PartPlan], None]
) -> None:
    overwrite(captured, part, 1, harm)
    assert recover(captured.path, pytest.fail).state == "ended"
    trial = create_trial(tmp_path / "out")
    check(trial, {1: tuple(PARTS[part][0])})
    (trouble,) = trial.troubles()["worker_0"]
    assert REASON in trouble
    assert len(trouble) <= 160


def test_a_step_of_which_all_is_overwritten_is_still_known(captured: Spool, tmp_path: Path) -> None:
    for part in PARTS:
        overwrite(captured, part, 1, everything)
    recover(captured.path, pytest.fail)
    trial = create_trial(tmp_path / "out")
    assert trial.missing(1) == {0: "dropped"}
    assert {name for drop in trial.dropped() for name in drop.names} == set(values_at(1))
    assert trial.steps() == [0, 2]
    assert len(trial.troubles()["worker_0"]) == 1


def test_what_is_overwritten_while_it_is_checksummed_is_dropped(
    captured: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the checksum of that tensor: it fits the wrong bytes."""
    due = [True]

    def overtaken(data: Any, before: int = 0) -> int:
        if len(data) == 400_000 and due:
            due.clear()
            overwrite(captured, "large", 0, piece_in_the_middle)
        return crc32c(data, before)

    monkeypatch.setattr("smdist.format.block.crc32c", overtaken)
    recover(captured.path, pytest.fail)
    assert not due
    check(create_trial(tmp_path / "out"), {0: ("large",)})


def test_a_declaration_that_does_not_hold_its_tensors_is_not_believed() -> None:
    """The kernel would read whatever lies behind the part."""
    plan = plan_of("small")
    (spec,) = plan.tensors
    memory = np.zeros(plan.nbytes, np.uint8)
    kind = plan.declaration(0)
    assert kind.guard(kernel.address_of(memory))
    beyond = TensorSpec(spec.name, "F32", spec.shape, spec.nbytes, 8, -1, ())
    for wrong in (PartPlan((), (beyond,), plan.nbytes), PartPlan((), (spec,), 8)):
        with pytest.raises(ValueError, match="exceed its"):
            wrong.declaration(0).guard(kernel.address_of(memory))
