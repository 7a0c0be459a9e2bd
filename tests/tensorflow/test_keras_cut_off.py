"""Handlers of signals that raise within `fit`, at any moment of the hook: it goes on with the next."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import smdist.tensorflow as smd
from tests.support.cuts import Cut, Cuts
from tests.tensorflow.keras_jobs import BATCH, data, hooked, make_model, read, way

TRAIN = smd.modes.TRAIN
INSIDE = ["weights", "gradients", "losses"]
KERNEL = "top/weights/top/kernel:0"


@pytest.mark.parametrize("name", ["eager", "compiled", "inline"])
def test_a_fit_that_is_cut_off_goes_on_with_the_next(tmp_path: Path, name: str) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    chance = random.Random(name)

    def fit(hook: smd.KerasHook) -> None:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])

    with hooked(tmp_path / "run", include_collections=INSIDE, **place) as hook:
        fit(hook)
        with Cuts() as cuts:
            fit(hook)
        batches = (hook.mode_steps[TRAIN] + 1) // 2
        whole = set(range(2 * batches))
        for _ in range(10):
            before = hook.mode_steps[TRAIN]
            with Cuts(chance.randrange(cuts.seen)), suppress(Cut):
                fit(hook)
            assert hook.mode_steps[TRAIN] - before <= batches
        last = hook.mode_steps[TRAIN]
        fit(hook)
        whole |= set(range(last + 1, last + 1 + batches))
        assert hook.mode_steps[TRAIN] == last + batches
    trial = read(tmp_path / "run")
    names = set(trial.tensor_names(step=0, mode=TRAIN))
    complete = trial.steps(mode=TRAIN)
    assert whole <= set(complete)
    for step in complete:
        assert set(trial.tensor_names(step=step, mode=TRAIN)) == names, step
    partial = set(trial.steps(mode=TRAIN, show_incomplete_steps=True)) - set(complete)
    assert all(set(trial.missing(step, TRAIN).values()) == {"dropped"} for step in partial)
    for step in complete:
        assert np.isfinite(trial.tensor(KERNEL).value(step, mode=TRAIN)).all()
