"""`steps_per_execution="auto"` of Keras 2, which changes the number while a model is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import BATCH, close, data, hooked, make_model, read, training

TRAIN = smd.modes.TRAIN


@pytest.mark.parametrize("place", [{}, {"rank": 0, "world_size": 2}], ids=["alone", "several"])
@pytest.mark.parametrize("interval", [7, 1000])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "results"])
def test_steps_are_counted(
    tmp_path: Path, inside: bool, interval: int, place: dict[str, Any]
) -> None:
    x, y = data()
    model = make_model(steps_per_execution="auto", jit_compile=False)

    class Tuning(tf.keras.callbacks.Callback):  # type: ignore[misc]
        """Stands for Keras' own, which needs minutes to change anything."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            model._steps_per_execution.assign(2)

    wanted = ["weights", "gradients"] if inside else []
    with hooked(tmp_path / "run", interval, include_collections=wanted, **place) as hook:
        model.fit(
            x, y, batch_size=BATCH, epochs=4, shuffle=False, verbose=0, callbacks=[hook, Tuning()]
        )  # fmt: skip
        assert hook.mode_steps[TRAIN] == int(model.optimizer.iterations) - 1
    if place:  # only results are seen, and they are of the last step of each execution
        return
    trial = read(tmp_path / "run")
    steps = [step for epoch in training(x, y, epochs=4) for step in epoch]
    due = list(range(0, len(steps), interval))
    assert trial.steps(mode=TRAIN) == due
    for number in due if inside else ():
        gradient = trial.tensor("gradients/hidden/kernelGrad").value(number, mode=TRAIN)
        close(gradient, steps[number].gradients["w1"])


def test_what_several_processes_cannot_see(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(8)
    model = make_model(steps_per_execution="auto", jit_compile=False)
    with hooked(tmp_path / "run", include_collections=["weights"], rank=0, world_size=2) as hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    assert "steps_per_execution runs several steps as one" in caplog.text
