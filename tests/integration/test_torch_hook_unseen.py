"""A registered module of which no call is seen, and settings that save nothing: both are said."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from tests.support.torch_jobs import Net, beside_waiting, hooked, read, train

UNSEEN = "Nothing was captured from Net: the registered module was never called."


def around_it(net: nn.Module) -> Any:
    """A graph that was there before the hook."""
    torch._dynamo.reset()
    model = torch.compile(net, backend="eager")

    @torch.compile(backend="eager")
    def around(x: torch.Tensor) -> Any:
        return model(x) * 2

    around(torch.ones(1, 4))
    return around


@pytest.mark.parametrize("how", ["forward", "graph"])
def test_training_that_goes_on_without_a_step_is_told_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    net = Net()
    forward: Any = net.forward if how == "forward" else around_it(net)
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net)
        forward(torch.ones(1, 4)).sum().backward()
        assert UNSEEN not in caplog.text  # its forward may have been before
        forward(torch.ones(1, 4)).sum().backward()
        assert UNSEEN in caplog.text
        forward(torch.ones(1, 4)).sum().backward()
        hook.save_scalar("lr", 0.1)
    assert caplog.text.count(UNSEEN) == 1
    (message,) = read(tmp_path / "run").troubles()["worker_0"]
    assert "Register the object the training loop calls" in message


def test_a_job_without_a_step_is_told_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    with hooked(tmp_path / "run") as hook:
        hook.register_module(net)
        copy.deepcopy(net)(torch.ones(1, 4))
        assert UNSEEN not in caplog.text
    assert caplog.text.count(UNSEEN) == 1


def test_a_job_that_failed_before_its_first_step_says_why_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = smd.Hook(tmp_path / "run")
    hook.register_module(Net())
    with pytest.raises(RuntimeError), hook:
        raise RuntimeError("no data")
    assert UNSEEN not in caplog.text


@pytest.mark.parametrize("settings", [{}, {"dry_run": True}, {"save_config": {"start_step": 9}}])
def test_steps_that_are_seen_are_no_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, object]
) -> None:
    net = Net()
    with hooked(tmp_path / "run", **settings) as hook:
        hook.register_module(net)
        hook.register_module(nn.Linear(1, 1))  # takes part in steps, if it likes
        train(net, 3)
        assert not net.fc1.weight._post_accumulate_grad_hooks
    assert not beside_waiting(caplog.messages)


def test_steps_drawn_by_hand_are_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hooked(tmp_path / "run") as hook:
        hook.register_module(Net(), step_on="manual")
        hook.save_scalar("lr", 0.1)
        hook.step()
    assert not beside_waiting(caplog.messages)


def test_warns_of_schedule_that_is_never_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    config = smd.SaveConfig(save_interval=100, start_step=1, end_step=100)
    with hooked(tmp_path / "run", include_collections=["weights"], save_config=config) as hook:
        hook.register_module(net)
        train(net, 3)
        hook.get_collection("weights").save_config = smd.SaveConfig(end_step=50, start_step=60)
        train(net, 3)
    (said,) = beside_waiting(caplog.messages)
    assert "Collections weights, losses will never be saved" in said
    assert "[start_step=1, end_step=100). Raise end_step" in said


def test_warns_of_schedule_set_on_a_collection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.get_collection("weights").save_config = smd.SaveConfig(
            save_interval=1, start_step=10, end_step=5
        )
        hook.register_module(net)
        train(net, 1)
    assert "[start_step=10, end_step=5)" in caplog.text


def test_warns_at_close_of_patterns_without_match(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["mine", "gradients"]) as hook:
        hook.get_collection("mine").include(["fc1.weight", "fc3", "(?i)FC1.bias"])
        hook.register_module(net)
        train(net, 2)
        assert "fc3" not in caplog.text
    ((told,),) = read(tmp_path / "run").troubles().values()
    assert told == (
        "include_regex 'fc3' of collection 'mine' matched no tensor and saved nothing. "
        "Compare it with trial.tensor_names()."
    )
    assert caplog.text.count(told) == 1
