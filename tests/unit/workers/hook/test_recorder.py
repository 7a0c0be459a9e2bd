"""What a recorder keeps must not grow with a job."""

from __future__ import annotations

from smdist.config import PYTORCH, HookConfig
from smdist.identity import ModeKeys, StepRef
from smdist.planning import Planner
from smdist.workers.hook import recorder
from smdist.workers.hook.capture_session import DrySink
from smdist.workers.hook.recorder import Recorder


def test_tensors_that_are_others_at_every_step_do_not_fill_the_memory() -> None:
    """As the gradients of a mixture of experts: each step has those of other experts."""
    config = HookConfig.from_arguments(PYTORCH, out_dir="/out", include_regex=["expert"])
    planner = Planner(config, config.build_manager())
    plan = planner.at(ModeKeys.TRAIN, 0)
    recording: Recorder[int] = Recorder(lambda value: ("F32", (value,), 4 * value))
    sink: DrySink[int] = DrySink()
    recording.begin(sink, StepRef(ModeKeys.TRAIN, 0, 0), plan)
    many = 3 * recorder._MAX_GROUPS
    for step in range(many):
        recording.offer_many((f"expert{step}", f"other{step}"), (1, 2))
    assert sink.tensors == many
    kept = (recording._chosen, recording._groups, recording._parts)
    assert all(len(entries) <= recorder._MAX_GROUPS for entries in kept)
