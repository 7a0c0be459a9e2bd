"""Values that a script hands to the PyTorch hook itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from tests.integration.torch_jobs import (
    PARAMETERS,
    Net,
    as_array,
    hooked,
    read,
    same,
    train,
)

TRAIN, EVAL = smd.modes.TRAIN, smd.modes.EVAL


def test_scalars_stay_at_their_step_whatever_the_interval(tmp_path: Path) -> None:
    net = Net()
    config = smd.SaveConfig(save_interval=5)
    with hooked(tmp_path / "run", include_collections=["weights"], save_config=config) as hook:
        hook.register_module(net)
        train(net, 8, after=lambda step: hook.save_scalar("loss", step * 1.5))
    trial = read(tmp_path / "run")
    assert trial.tensor("Net_fc1.weight").steps() == [0, 5]
    values = trial.tensor("scalar/loss").values()
    assert {step: float(value) for step, value in values.items()} == {
        step: step * 1.5 for step in range(8)
    }


def test_arrays_of_the_other_byte_order_have_the_same_values(tmp_path: Path) -> None:
    given = {
        code: np.arange(6).reshape(2, 3).astype(f">{code}")
        for code in ("f2", "f4", "f8", "i2", "i4", "i8", "u2", "u4", "u8", "c8", "c16")
    }
    with hooked(tmp_path / "run") as hook:
        for code, value in given.items():
            hook.save_tensor(code, value)
        hook.save_scalar("one", np.float32(1.5).astype(">f4"))
        hook.save_tensor("part", given["f4"][:, ::2])
    trial = read(tmp_path / "run")
    for code, value in given.items():
        assert same(trial.tensor(code).value(0), value.astype(f"<{code}"))
    assert trial.tensor("scalar/one").value(0) == 1.5
    assert trial.tensor("part").value(0).tolist() == [[0.0, 2.0], [3.0, 5.0]]


def test_values_that_one_rank_adds_between_due_steps_make_no_step_partial(tmp_path: Path) -> None:
    for rank in (0, 1):
        net = Net()
        with hooked(
            tmp_path / "run",
            include_workers="all",
            rank=rank,
            world_size=2,
            save_config=smd.SaveConfig(save_interval=2),
            include_collections=["weights"],
        ) as hook:
            hook.register_module(net)
            for step in range(4):
                net(torch.ones(2, 4))
                if rank == 0:
                    hook.save_scalar("accuracy", step / 4)
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1, 2, 3]
    assert trial.missing(1) == {}
    assert trial.tensor("scalar/accuracy").steps() == [0, 1, 2, 3]
    assert trial.tensor(PARAMETERS[0]).steps() == [0, 2]


def test_a_step_with_a_value_alone_is_closed_by_the_next(tmp_path: Path) -> None:
    net = Net()
    config = smd.SaveConfig(save_interval=100)
    with hooked(tmp_path / "run", include_collections=["weights"], save_config=config) as hook:
        hook.register_module(net)
        train(net, 3)
        hook.save_scalar("x", 1)
        capture = hook._outlet.capture
        assert capture is not None
        assert capture.open_step == (smd.modes.GLOBAL, 2, 2)
        train(net, 1)
        assert capture.open_step is None


def test_a_value_of_another_mode_does_not_draw_gradients_along(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:
        hook.register_module(net)
        hook.set_mode(EVAL)
        net(torch.randn(1, 4))
        hook.set_mode(TRAIN)
        loss = net(torch.randn(1, 4)).sum()
        hook.set_mode(EVAL)
        hook.save_scalar("accuracy", 0.5)
        hook.set_mode(TRAIN)
        loss.backward()
    trial = read(tmp_path / "run")
    assert trial.tensor("gradient/Net_fc1.weight").steps(mode=TRAIN) == [0]
    assert trial.tensor("scalar/accuracy").steps(mode=EVAL) == [0]


def test_values_saved_before_the_first_step_belong_to_it(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net)
        hook.save_scalar("seed", 7)
        hook.set_mode(TRAIN)
        early = torch.ones(2)
        hook.save_tensor("early", early)
        early.zero_()
        net(torch.randn(1, 4))
        hook.set_mode(EVAL)
        hook.save_scalar("between", 1)
        net(torch.randn(1, 4))
        hook.set_mode(TRAIN)
        hook.save_scalar("accuracy", 0.5)
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0]
    assert trial.tensor("early").value(0, mode=TRAIN).tolist() == [1.0, 1.0]
    assert trial.tensor("scalar/between").steps(mode=EVAL) == [0]
    assert trial.tensor("scalar/accuracy").steps(mode=TRAIN) == [0]
    assert trial.tensor("scalar/seed").steps(mode=TRAIN) == [0], "the first step of all"
    assert trial.troubles() == {}


def test_a_value_saved_twice_in_a_step_is_told(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_module(net)
        for step in range(3):
            hook.save_scalar("rate", step)  # before the forward: of the step before
            net(torch.randn(1, 4))
    trial = read(tmp_path / "run")
    rates = trial.tensor("scalar/rate")
    assert {step: rates.value(step).item() for step in rates.steps()} == {0: 1.0, 1: 2.0}
    (told,) = trial.troubles()["worker_0"]
    assert "scalar/rate was saved more than once in a step" in told


def test_values_of_a_mode_in_which_no_step_is_seen(tmp_path: Path) -> None:
    """What is evaluated is not what was registered: values that come again begin steps of their own,
    until there are others."""
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"]) as hook:
        hook.register_module(net)
        for epoch in range(3):
            hook.set_mode(TRAIN)
            net(torch.randn(1, 4)).sum().backward()
            hook.set_mode(EVAL)
            hook.save_scalar("score", epoch)
            hook.save_scalar("other", -epoch)
        hook.save_scalar("score", 3)  # there was no training since
        net(torch.randn(1, 4))
        hook.save_scalar("score", 4)
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0, 1, 2]
    scores, others = trial.tensor("scalar/score"), trial.tensor("scalar/other")
    assert scores.values(mode=EVAL) == {step: float(step) for step in range(5)}
    assert others.values(mode=EVAL) == {0: 0.0, 1: -1.0, 2: -2.0}
    assert trial.tensor("Net_fc1.weight").steps(mode=EVAL) == [4]
    assert trial.tensor("gradient/Net_fc1.weight").steps(mode=TRAIN) == [0, 1, 2]
    assert trial.troubles() == {}


def test_tensors_join_every_collection_they_are_given(tmp_path: Path) -> None:
    with hooked(tmp_path / "run") as hook:
        hook.save_tensor("a", np.arange(3), collections_to_write=["mine", "losses"])
        hook.save_tensor("b", [1.0, 2.0], collections_to_write="mine")
        hook.save_scalar("metric", 3, sm_metric=True)
        hook.step()
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names(collection="mine")) == {"a", "b"}
    assert trial.tensor_names(collection="losses") == ["a"]
    assert trial.tensor_names(collection="sm_metrics") == ["scalar/metric"]
    assert same(trial.tensor("a").value(0), np.arange(3))


def test_functional_losses(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run") as hook:
        hook.register_module(net)
        loss = nn.functional.mse_loss(net(torch.randn(2, 4)), torch.zeros(2, 2))
        hook.record_tensor_value("mse_loss", loss)
    trial = read(tmp_path / "run")
    assert same(trial.tensor("mse_loss_output_0").value(0), as_array(loss))
    assert trial.tensor_names(collection="losses") == ["mse_loss_output_0"]


@pytest.mark.parametrize("before", [True, False])
def test_tensors_of_a_module_by_hand(tmp_path: Path, before: bool) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["mine"]) as hook:
        if not before:
            hook.register_module(net)
        mine = hook.get_collection("mine")
        assert isinstance(mine, smd.Collection)
        mine.add_module_tensors(net.relu, inputs=True, outputs=True)
        if before:
            hook.register_module(net)
        net(torch.randn(2, 4))
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names(collection="mine")) == {"relu_input_0", "relu_output_0"}


def test_names_that_cannot_be_written_are_saved_with_an_escape(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["weights"], on_error="warn") as hook:
        hook.register_module(net)
        train(net, 1)
        hook.save_tensor("\ud800small", np.arange(4))
        hook.save_tensor("\ud800large", np.arange(4000))
        hook.save_scalar("\ud800", 3)
        hook.save_tensor("after", np.arange(4), "c\ud800")
        hook.save_tensor("\ud800none", object())
        hook.get_collection("d\ud800").include("\ud800")
        train(net, 1)
        assert hook.usage() is not None
    trial = read(tmp_path / "run")
    assert trial.steps() == [0, 1]
    assert trial.tensor(r"\ud800large").value(0).shape == (4000,)
    assert trial.tensor(r"\ud800small").value(0).shape == (4,)
    assert float(trial.tensor(r"scalar/\ud800").value(0)) == 3
    assert trial.tensor_names(collection=r"c\ud800") == ["after"]
    assert r"d\ud800" in trial.collections()
    told = [message for messages in trial.troubles().values() for message in messages]
    assert any(r"the name \ud800large holds half" in message for message in told)
    assert any(r"saving \ud800none" in message for message in told)
