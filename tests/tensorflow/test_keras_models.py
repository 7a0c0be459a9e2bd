"""Models that change while a hook looks at them, and models that come and go."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from smdist.workers.keras_adapter import model_building
from smdist.workers.keras_adapter.model_cache import _Slot
from smdist.workers.keras_adapter.phase import MODES
from tests.tensorflow.keras_jobs import (
    BATCH,
    RATE,
    WEIGHTS,
    close,
    data,
    hooked,
    initial,
    is_ours,
    make_model,
    read,
    training,
    way,
)

TRAIN = smd.modes.TRAIN
ways = pytest.mark.parametrize("name", ["eager", "compiled", "plain", "inline"])


def compiled(model: Any, options: dict[str, Any]) -> Any:
    given = {"run_eagerly" if key == "eager" else key: value for key, value in options.items()}
    model.compile(tf.keras.optimizers.SGD(RATE), "mse", **given)
    return model


@ways
def test_layers_that_are_frozen_at_first(tmp_path: Path, name: str) -> None:
    x, y = data(8)
    options, place = way(name)
    model = make_model(compiled=False)
    frozen = model.get_layer("hidden")
    frozen.trainable = False
    compiled(model, options)
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"], **place) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        frozen.trainable = True
        compiled(model, options)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor("gradients/top/kernelGrad").steps(mode=TRAIN) == [0, 1, 2, 3]
    gradient = trial.tensor("gradients/hidden/kernelGrad")
    assert gradient.steps(mode=TRAIN) == [2, 3]
    weight = trial.tensor("hidden/weights/hidden/kernel:0")
    close(weight.value(2, mode=TRAIN), initial()["w1"])
    after = weight.value(2, mode=TRAIN) - RATE * gradient.value(2, mode=TRAIN)
    close(weight.value(3, mode=TRAIN), after)


def test_a_change_that_keras_does_not_know_of_yet(tmp_path: Path) -> None:
    """Before it is compiled anew, a model is trained as it was."""
    x, y = data(8)
    model = make_model(compiled=False)
    frozen = model.get_layer("hidden")
    frozen.trainable = False
    compiled(model, {})
    with hooked(tmp_path / "run", include_collections=["gradients"]) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        frozen.trainable = True
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor("gradients/top/kernelGrad").steps(mode=TRAIN) == [0, 1, 2, 3]
    assert "gradients/hidden/kernelGrad" not in trial.tensor_names()
    close(frozen.kernel, initial()["w1"])


@ways
def test_models_that_nobody_needs_any_more_are_gone(tmp_path: Path, name: str) -> None:
    x, y = data(8)
    options, place = way(name)
    with hooked(tmp_path / "run", save_all=True, **place) as hook:
        models = []
        for _ in range(3):
            model = make_model(**options)
            model.fit(
                x, y, batch_size=BATCH, verbose=0, callbacks=[hook], validation_data=(x, y)
            )  # fmt: skip
            model.predict(x, batch_size=BATCH, verbose=0, callbacks=[hook])
            models.append(weakref.ref(model))
            del model
        gc.collect()
        assert [model() is not None for model in models] == [False, False, True]
    assert read(tmp_path / "run").steps(mode=TRAIN) == list(range(6))


def test_a_model_goes_on_after_its_hook_is_gone(tmp_path: Path) -> None:
    """Keras' function still asks whether anybody wants to know."""
    x, y = data(8)
    options, place = way("inline")
    model = make_model(**options)
    with hooked(tmp_path / "run", save_all=True, **place) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    del hook
    gc.collect()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    steps = [step for epoch in training(x, y, epochs=2) for step in epoch]
    close(model.get_weights()[0], steps[-1].updated["w1"])


@pytest.mark.parametrize("name", ["compiled", "inline"])
def test_models_that_are_trained_by_turns(tmp_path: Path, name: str) -> None:
    """Nothing is traced again, and nothing stays on them."""
    x, y = data(8)
    calls = 0

    class Counting(tf.keras.layers.Dense):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            return super().call(inputs)

    options, place = way(name)
    models = [
        compiled(tf.keras.Sequential([tf.keras.Input(shape=(3,)), Counting(2, name=name)]), options)
        for name in ("one", "other")
    ]
    wanted = ["weights", "gradients", "layers"]
    with hooked(tmp_path / "run", include_collections=wanted, **place) as hook:
        seen = []
        for _ in range(3):
            for model in models:
                model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
            seen.append(calls)
        assert seen == [seen[0]] * 3
    assert not [key for model in models for key in vars(model) if "smdist" in key]
    trial = read(tmp_path / "run")
    assert trial.tensor("gradients/one/kernelGrad").steps(mode=TRAIN) == [0, 1, 4, 5, 8, 9]
    assert trial.tensor("other/outputs").steps(mode=TRAIN) == [2, 3, 6, 7, 10, 11]


def test_of_a_copy_of_a_model_nothing_is_known() -> None:
    assert copy.deepcopy({"known": _Slot(1)}) == {"known": None}
    assert pickle.loads(pickle.dumps(_Slot(1))) is None


def test_a_registered_model_stays(tmp_path: Path) -> None:
    x, y = data(8)
    model, other = make_model(compiled=False), make_model()
    with hooked(tmp_path / "run", include_collections=["weights"]) as hook:
        hook.register_model(model)
        for _ in range(2):
            other.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
            with hook.wrap_tape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            tape.gradient(loss, model.trainable_variables)
    trial = read(tmp_path / "run")
    for name, key in WEIGHTS.items():
        if "kernel" in name:
            for step in (2, 5):
                close(trial.tensor(name).value(step, mode=TRAIN), initial()[key])


class Marked(tf.keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="marked")
        self.top = tf.keras.layers.Dense(2, name="top")
        self.unused = tf.keras.layers.Dense(2, name="unused")

    def call(self, x: Any) -> Any:
        return self.top(x)


@ways
@pytest.mark.filterwarnings("ignore:`build")
def test_a_model_that_is_only_marked_as_built(tmp_path: Path, name: str) -> None:
    """Keras 3: `build` knows nothing of what `call` does."""
    x, y = data()
    options, place = way(name)
    model = Marked()
    model.build((None, 3))
    compiled(model, options)
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"], **place) as hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[hook])
    trial = read(tmp_path / "run")
    kernel = trial.tensor("top/weights/top/kernel:0").values(mode=TRAIN)
    gradient = trial.tensor("gradients/top/kernelGrad").values(mode=TRAIN)
    assert list(kernel) == list(gradient) == list(range(5))
    for step in range(4):
        close(kernel[step + 1], kernel[step] - RATE * gradient[step])
    assert not trial.troubles()


class Pair(tf.keras.Model):  # type: ignore[misc]
    """As a GAN is: it is never called, its step calls its layers."""

    def __init__(self, built: bool) -> None:
        super().__init__(name="pair")
        self.maker = tf.keras.layers.Dense(3, name="maker")
        self.judge = tf.keras.layers.Dense(1, name="judge")
        for layer in (self.maker, self.judge) if built else ():
            layer.build((None, 3))

    def train_step(self, data: Any) -> Any:
        given = data[0] if isinstance(data, tuple) else data
        noise = tf.random.normal(tf.shape(given))
        layers = (self.maker, self.judge)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.judge(self.maker(noise)) ** 2)
        variables = [variable for layer in layers for variable in layer.trainable_variables]
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


@ways
@pytest.mark.parametrize("built", [True, False], ids=["built", "not built"])
def test_a_model_that_is_never_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, built: bool
) -> None:
    tf.random.set_seed(5)
    x = np.zeros((20, 3), np.float32)
    options, place = way(name)
    model = compiled(Pair(built), options)
    wanted = ["weights", "gradients", "layers"]
    with hooked(tmp_path / "run", include_collections=wanted, **place) as hook:
        model.fit(x, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[hook])
    told = [record.getMessage() for record in caplog.records if record.name == "smdist"]
    assert not told
    trial = read(tmp_path / "run")
    assert not trial.troubles()
    kernel = trial.tensor("maker/weights/maker/kernel:0").values(mode=TRAIN)
    gradient = trial.tensor("gradients/maker/kernelGrad").values(mode=TRAIN)
    assert set(kernel) >= set(range(0 if built else 1, 5))
    assert set(gradient) >= set(range(0 if built else 1, 5))
    for step in range(1, 4):
        close(kernel[step + 1], kernel[step] - RATE * gradient[step])
    noise = trial.tensor("maker/inputs").values(mode=TRAIN)
    assert len(noise) == len({value.tobytes() for value in noise.values()}) == 5


def test_a_model_that_cannot_be_built_early_gives_a_warning_of_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data(8)

    def fail(*_: Any) -> Any:
        raise RuntimeError("cannot be traced\nin many words")

    model = tf.keras.Sequential([tf.keras.layers.Dense(2, name="top")], name="late")
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    monkeypatch.setattr(model_building, "_build_by_tracing", fail)
    monkeypatch.setattr(model_building, "_run_once", fail)
    config = smd.SaveConfig(save_interval=1)
    with smd.KerasHook(tmp_path, include_collections=["weights"], save_config=config) as hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    told = [record.getMessage() for record in caplog.records if record.name == "smdist"]
    (warning,) = (text for text in told if "late could not be built before its first step" in text)
    assert "whose weights are not saved: cannot be traced (" in warning


@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_a_step_that_the_script_got_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, eager: bool
) -> None:
    """Keras says what is wrong, and nobody says that training goes on."""
    x, _ = data(8)
    with hooked(tmp_path / "run", include_collections=["weights", "gradients"]) as hook:
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            make_model(eager=eager).fit(
                x, np.zeros((8, 7), np.float32), batch_size=BATCH, verbose=0, callbacks=[hook]
            )
        assert not [record for record in caplog.records if record.name == "smdist"]


@ways
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_callback_that_runs_another_model(tmp_path: Path, name: str, method: str) -> None:
    """With the same hook. What each step has is of the model that runs it."""
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    layers = [tf.keras.Input(shape=(3,)), tf.keras.layers.Dense(2, name="other")]
    other = compiled(tf.keras.Sequential(layers), options)
    given: dict[str, Any] = {"batch_size": BATCH, "verbose": 0}

    class Looking(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                labels = () if method == "predict" else (y,)
                getattr(other, method)(x, *labels, callbacks=[hook], **given)

    with hooked(tmp_path / "run", include_collections=["weights"], **place) as hook:
        model.fit(
            x, y, shuffle=False, callbacks=[Looking(), hook], validation_data=(x, y), **given
        )  # fmt: skip
        for found in (model, other):
            assert not [f"{k}_step" for k in MODES if f"{k}_step" in vars(found)]
            assert not [k for k in MODES if is_ours(getattr(found, f"{k}_function"))]
        assert hook.model is model
        before = hook.mode_steps
        model.fit(x, y, **given)
        assert hook.mode_steps == before
    trial = read(tmp_path / "run")
    mode = {"fit": TRAIN, "evaluate": smd.modes.EVAL, "predict": smd.modes.PREDICT}[method]
    kernel = trial.tensor("top/weights/top/kernel:0")
    assert len(kernel.steps(mode=smd.modes.EVAL)) == 5
    seen = list(kernel.values(mode=TRAIN).values())
    for value, step in zip(seen, training(x, y)[0], strict=True):
        close(value, step.weights["w2"])
    theirs = trial.tensor("other/weights/other/kernel:0")
    assert {m: len(theirs.steps(mode=m)) for m in MODES.values()} == {
        m: 5 if m is mode else 0 for m in MODES.values()
    }
