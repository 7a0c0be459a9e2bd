"""Capture from inside Keras' own function, as in a process of several: what the graph does not tell,
what goes wrong while it is traced, and what stays of a hook."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import smdist.tensorflow as smd
from smdist.workers.keras_adapter.recording import KerasRecording
from smdist.workers.keras_adapter.step_probes import StepProbes
from tests.tensorflow.keras_jobs import (
    BATCH,
    GRADIENTS,
    close,
    data,
    hooked,
    make_model,
    parts_of,
    read,
    training,
    wait_until_gone,
    way,
)

TRAIN = smd.modes.TRAIN
OPTIONS, PLACE = way("inline")
FIT: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def test_what_is_asked_for_later(tmp_path: Path) -> None:
    x, y = data()
    model = make_model(**OPTIONS)
    with hooked(tmp_path / "run", include_collections=["gradients", "weights"], **PLACE) as hook:
        gradients, weights = hook.get_collection("gradients"), hook.get_collection("weights")
        gradients.save_config = weights.save_config = smd.SaveConfig(end_step=0)
        model.fit(x, y, callbacks=[hook], **FIT)
        weights.save_config = smd.SaveConfig(save_interval=1)
        model.fit(x, y, callbacks=[hook], **FIT)
        gradients.save_config = smd.SaveConfig(save_interval=2)
        model.fit(x, y, callbacks=[hook], **FIT)
        made = model.train_function
        model.fit(x, y, callbacks=[hook], **FIT)
        assert model.train_function is made
    trial = read(tmp_path / "run")
    steps = [step for epoch in training(x, y, epochs=4) for step in epoch]
    kernel = trial.tensor("hidden/weights/hidden/kernel:0").values(mode=TRAIN)
    assert list(kernel) == list(range(5, 20))
    for step, found in kernel.items():
        close(found, steps[step].weights["w1"])
    for name, key in GRADIENTS.items():
        values = trial.tensor(name).values(mode=TRAIN)
        assert list(values) == list(range(10, 20, 2))
        for step, found in values.items():
            close(found, steps[step].gradients[key])


@pytest.mark.parametrize("part", ["names", "end"])
def test_an_error_while_the_step_is_traced_is_no_error_of_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    x, y = data()
    model = make_model(**OPTIONS)

    def fail(*_: Any) -> Any:
        raise RuntimeError("cannot look")

    if part == "names":
        monkeypatch.setattr(KerasRecording, "wanted_on_any_step", fail)
    else:
        monkeypatch.setattr(StepProbes, "_storable", fail)
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        smd.KerasHook(
            tmp_path / "run",
            save_config=smd.SaveConfig(save_interval=1),
            include_collections=["gradients"],
            **PLACE,
        ) as hook,
    ):
        model.fit(x, y, callbacks=[hook], **FIT)
        assert hook.mode_steps[TRAIN] == 4
    assert said(caplog, "cannot look") == 1
    assert read(tmp_path / "run").tensor("loss").steps(mode=TRAIN) == list(range(5))
    close(model.get_weights()[0], training(x, y)[0][-1].updated["w1"])


def test_a_closed_hook_is_not_held_by_the_model(tmp_path: Path) -> None:
    """Keras' function goes on asking, and nobody answers."""
    x, y = data()
    model = make_model(**OPTIONS)
    hook = hooked(tmp_path / "run", save_all=True, **PLACE)
    model.fit(x, y, callbacks=[hook], validation_data=(x, y), **FIT)
    hook.close()
    parts = parts_of(hook)
    del hook
    wait_until_gone(parts)
    model.fit(x, y, **FIT)
    close(model.get_weights()[0], training(x, y, epochs=2)[-1][-1].updated["w1"])
