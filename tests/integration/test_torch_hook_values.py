"""Values that a script hands to the PyTorch hook itself."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import smdist.pytorch as smd
from smdist.errors import ConfigurationError
from tests.support.torch_jobs import (
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


def test_threads_that_save_first_at_once_begin_one_session(tmp_path: Path) -> None:
    start = threading.Barrier(4)

    def save(hook: smd.Hook, first: int) -> None:
        start.wait()
        for number in range(first, first + 5):
            hook.save_tensor(f"t{number}", torch.full((300,), float(number)))

    with hooked(tmp_path / "run") as hook:
        hook.step()
        threads = [threading.Thread(target=save, args=(hook, 5 * i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trial = read(tmp_path / "run")
    assert trial.troubles() == {}
    for number in range(20):
        (value,) = trial.tensor(f"t{number}").values().values()
        assert (value == number).all()


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
        capture = hook._core.session.capture
        assert capture is not None
        assert capture._is_open
        train(net, 1)
        assert not capture._is_open


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


class Enumerated(str, enum.Enum):
    NAME = "enumerated"


@pytest.mark.parametrize("name", [5, None, b"loss", ["loss"], torch.zeros(3)])
def test_a_name_that_is_no_text_is_refused_at_once(tmp_path: Path, name: Any) -> None:
    hook = smd.Hook(tmp_path / "run", rank=1, world_size=2)  # also where nothing is saved
    calls: list[Callable[[], object]] = [
        lambda: hook.save_tensor(name, torch.zeros(2)),
        lambda: hook.save_scalar(name, 1.0),
        lambda: hook.record_tensor_value(name, torch.zeros(2)),
        lambda: hook.get_collection(name),
        lambda: hook.get_collection(name, create=False),
    ]
    if not isinstance(name, list):  # of which there may be several in a call
        calls += [
            lambda: hook.save_tensor("ok", torch.zeros(2), collections_to_write=name),
            lambda: hook.save_tensor("ok", torch.zeros(2), collections_to_write=[name]),
            lambda: hook.get_collection("mine").include(name),
            lambda: hook.get_collection("mine").add_tensor_name(name),
        ]
    for call in calls:
        with pytest.raises(ConfigurationError, match="text") as caught:
            call()
        assert len(str(caught.value)) <= 160
    hook.close()
    assert hook.errors == 0


def test_text_of_any_kind_is_a_name(tmp_path: Path) -> None:
    with hooked(tmp_path / "run", include_collections=["np"]) as hook:
        hook.get_collection(np.str_("np")).include(np.str_("^w"))
        hook.get_collection("np").add_tensor_name(np.str_("b"))
        hook.save_tensor(np.str_("x"), np.arange(3), np.str_("np"))
        hook.save_tensor("y", np.arange(3), [Enumerated.NAME])
        hook.save_scalar(Enumerated.NAME, 1)
        hook.save_scalar(np.str_("z"), 2)
        hook.step()
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names()) == {"x", "y", "scalar/enumerated", "scalar/z"}
    assert trial.tensor_names(collection="np") == ["x"]
    assert trial.tensor_names(collection="enumerated") == ["y"]


def test_the_time_of_a_scalar_is_kept_beside_it(tmp_path: Path) -> None:
    net = Net()
    with hooked(tmp_path / "run", include_collections=["losses"]) as hook:
        hook.register_module(net)
        for step, when in enumerate((1_700_000_000.25, np.float64(1.5), 0)):
            net(torch.ones(2, 4))
            hook.save_scalar("loss", step, timestamp=when)
            hook.save_scalar("other", step)
    trial = read(tmp_path / "run")
    times = trial.tensor("timestamp/loss").values()
    assert {step: float(value) for step, value in times.items()} == {
        0: 1_700_000_000.25,
        1: 1.5,
        2: 0.0,
    }
    assert trial.tensor("scalar/loss").values() == {0: 0, 1: 1, 2: 2}
    assert not trial.has_tensor("timestamp/other")


def test_times_of_values_that_begin_their_steps_go_with_them(tmp_path: Path) -> None:
    with hooked(tmp_path / "run", include_collections=["losses"]) as hook:
        net = Net()
        hook.register_module(net)
        net(torch.ones(2, 4))
        hook.set_mode(EVAL)
        for epoch in range(3):
            hook.save_scalar("score", epoch, timestamp=100.0 + epoch)
    trial = read(tmp_path / "run")
    scores, times = trial.tensor("scalar/score"), trial.tensor("timestamp/score")
    assert scores.values(mode=EVAL) == {0: 0, 1: 1, 2: 2}
    assert times.values(mode=EVAL) == {0: 100.0, 1: 101.0, 2: 102.0}


@pytest.mark.parametrize(
    "when", [True, "now", "12", b"1", -1.0, math.nan, math.inf, 1.7e12, 10**400, [1.0], np.ones(2)]
)
def test_a_time_that_is_none_is_refused(tmp_path: Path, when: Any) -> None:
    with (
        hooked(tmp_path / "run") as hook,
        pytest.raises(ConfigurationError, match="seconds since 1970") as caught,
    ):
        hook.save_scalar("loss", 1.0, timestamp=when)
    assert len(str(caught.value)) <= 160
    assert hook.usage() is None, "nothing was saved"


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
    assert any(
        r"The name \ud800large contains an unpaired surrogate" in message for message in told
    )
    assert any(r"saving \ud800none" in message for message in told)
