"""A `fit`, `evaluate` or `predict` that ends with an exception, of which Keras tells nobody.

What comes next may have the same hook, another one, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from tests.tensorflow.keras_jobs import (
    BATCH,
    close,
    data,
    hooked,
    is_ours,
    make_model,
    read,
    training,
    way,
)

TRAIN, EVAL, PREDICT = smd.modes.TRAIN, smd.modes.EVAL, smd.modes.PREDICT
INSIDE = ["weights", "gradients"]
ways = pytest.mark.parametrize("name", ["eager", "compiled", "inline"])
KERNEL = "top/weights/top/kernel:0"


class Interrupt(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Ctrl-C after the second batch of `kind`."""

    def __init__(self, kind: str = "train") -> None:
        super().__init__()
        setattr(self, f"on_{kind}_batch_end", self._stop)

    def _stop(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            raise KeyboardInterrupt

    def _implements_train_batch_hooks(self) -> bool:  # Keras 2 asks
        return True

    _implements_test_batch_hooks = _implements_predict_batch_hooks = _implements_train_batch_hooks


class InterruptAtEnd(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Ctrl-C before the hook hears that all is over. Keras 2 tells nobody of single batches then."""

    def _stop(self, logs: Any = None) -> None:
        raise KeyboardInterrupt

    on_train_end = on_test_end = on_predict_end = _stop


def runner(model: Any, method: str, **options: Any) -> Callable[..., None]:
    """`model.method` on all data, in batches, with the callbacks that it is called with."""
    x, y = data()
    given = (x,) if method == "predict" else (x, y)
    if method == "fit":
        options["shuffle"] = False

    def run(*callbacks: Any) -> None:
        getattr(model, method)(
            *given, batch_size=BATCH, verbose=0, callbacks=list(callbacks), **options
        )

    return run


def on_the_model(model: Any) -> list[str]:
    found = []
    for kind in ("train", "test", "predict"):
        if is_ours(getattr(model, f"{kind}_function")):
            found.append(f"{kind}_function")
        if f"{kind}_step" in vars(model):
            found.append(f"{kind}_step")
    return found


@ways
@pytest.mark.parametrize("validated", [False, True], ids=["", "validated"])
def test_a_later_fit_is_none_of_the_hook_s_business(
    tmp_path: Path, name: str, validated: bool
) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    more = {"validation_data": (x, y), "validation_batch_size": BATCH} if validated else {}
    fit = runner(model, "fit", **more)
    with hooked(tmp_path / "run", include_collections=INSIDE, **place) as hook:
        with pytest.raises(KeyboardInterrupt):
            fit(hook, Interrupt())
        fit()
        assert on_the_model(model) == []
        model.evaluate(x, y, batch_size=BATCH, verbose=0)
        assert hook.mode_steps[TRAIN] == 1
        fit(hook)
        assert hook.mode_steps[TRAIN] == 6
        assert on_the_model(model) == []
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == list(range(7))
    assert trial.steps(mode=EVAL) == (list(range(5)) if validated else [])
    first = training(x[:8], y[:8])[0]
    unseen = training(x, y, weights=first[-1].updated)[0]
    second = training(x, y, weights=unseen[-1].updated)[0]
    for number, step in enumerate([*first, *second]):
        close(trial.tensor(KERNEL).value(number, mode=TRAIN), step.weights["w2"])
        gradient = trial.tensor("gradients/top/kernelGrad").value(number, mode=TRAIN)
        close(gradient, step.gradients["w2"])


@ways
def test_closing_leaves_the_model_as_it_was(tmp_path: Path, name: str) -> None:
    options, place = way(name)
    model = make_model(**options)
    hook = hooked(tmp_path / "run", include_collections=INSIDE, **place)
    with pytest.raises(KeyboardInterrupt):
        runner(model, "fit")(hook, Interrupt())
    hook.close()
    assert on_the_model(model) == []
    runner(model, "fit")()
    assert read(tmp_path / "run").steps(mode=TRAIN) == [0, 1]


@ways
def test_another_hook_gets_what_comes_next(tmp_path: Path, name: str) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    fit = runner(model, "fit")
    with (
        hooked(tmp_path / "one", include_collections=INSIDE, **place) as one,
        hooked(tmp_path / "other", include_collections=INSIDE, **place) as other,
    ):
        with pytest.raises(KeyboardInterrupt):
            fit(one, Interrupt())
        fit(other)
        assert on_the_model(model) == []
    assert read(tmp_path / "one").steps(mode=TRAIN) == [0, 1]
    trial = read(tmp_path / "other")
    assert trial.steps(mode=TRAIN) == [0, 1, 2, 3, 4]
    weights = training(x[:8], y[:8])[0][-1].updated
    for number, step in enumerate(training(x, y, weights=weights)[0]):
        close(trial.tensor(KERNEL).value(number, mode=TRAIN), step.weights["w2"])


@ways
@pytest.mark.parametrize("at_end", [False, True], ids=["", "at its end"])
@pytest.mark.parametrize(
    ("method", "kind", "mode"),
    [("fit", "train", TRAIN), ("evaluate", "test", EVAL), ("predict", "predict", PREDICT)],
)
def test_whatever_is_interrupted(
    tmp_path: Path, name: str, method: str, kind: str, mode: Any, at_end: bool
) -> None:
    options, place = way(name)
    model = make_model(**options)
    run = runner(model, method)
    with hooked(tmp_path / "run", include_collections=INSIDE, **place) as hook:
        with pytest.raises(KeyboardInterrupt):
            run(InterruptAtEnd() if at_end else Interrupt(kind), hook)
        before = 5 if at_end else 2
        run()
        assert on_the_model(model) == []
        assert hook.mode_steps[mode] == before - 1
        run(hook)
        assert on_the_model(model) == []
    trial = read(tmp_path / "run")
    assert trial.tensor(KERNEL).steps(mode=mode) == list(range(before + 5))


@ways
def test_an_interrupted_validation(tmp_path: Path, name: str) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    fit = runner(model, "fit", validation_data=(x, y), validation_batch_size=BATCH)
    with hooked(tmp_path / "run", include_collections=INSIDE, **place) as hook:
        with pytest.raises(KeyboardInterrupt):
            fit(hook, Interrupt("test"))
        model.evaluate(x, y, batch_size=BATCH, verbose=0)
        assert hook.mode_steps[EVAL] == 1
        fit()
        assert on_the_model(model) == []
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0, 1, 2, 3, 4]
    assert trial.steps(mode=EVAL) == [0, 1]


@ways
def test_what_a_callback_does_with_the_model_in_between(tmp_path: Path, name: str) -> None:
    """It has no hook, and the hook's own `fit` goes on."""
    x, y = data()
    options, place = way(name)
    model = make_model(**options)

    class Looking(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def look(self, *_: Any, **__: Any) -> None:
            model.evaluate(x, y, batch_size=BATCH, verbose=0)
            model.predict(x, batch_size=BATCH, verbose=0)

        on_train_begin = on_epoch_begin = on_epoch_end = on_train_batch_end = look

    fit = runner(model, "fit", epochs=2, validation_data=(x, y), validation_batch_size=BATCH)
    with hooked(tmp_path / "run", include_collections=INSIDE, **place) as hook:
        fit(Looking(), hook)
        assert on_the_model(model) == []
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == list(range(10))
    assert trial.steps(mode=EVAL) == list(range(10))
    assert trial.steps(mode=PREDICT) == []
    steps = [step for epoch in training(x, y, epochs=2) for step in epoch]
    for number, step in enumerate(steps):
        close(trial.tensor(KERNEL).value(number, mode=TRAIN), step.weights["w2"])


@pytest.mark.parametrize("name", ["eager", "compiled"])
def test_a_loop_over_train_on_batch(tmp_path: Path, name: str) -> None:
    """The loop says when it begins and ends; there is no history."""
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    with hooked(tmp_path / "run", include_collections=INSIDE, **place) as hook:
        hook.set_model(model)
        hook.on_train_begin()
        for start in range(0, len(x), BATCH):
            model.train_on_batch(x[start : start + BATCH], y[start : start + BATCH])
        hook.on_train_end()
        assert on_the_model(model) == []
    trial = read(tmp_path / "run")
    for number, step in enumerate(training(x, y)[0]):
        close(trial.tensor(KERNEL).value(number, mode=TRAIN), step.weights["w2"])
    assert trial.steps(mode=TRAIN) == [0, 1, 2, 3, 4]
