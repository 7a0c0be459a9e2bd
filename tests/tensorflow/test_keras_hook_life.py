"""When the Keras hook saves, what it leaves behind, and what it does not get in the way of."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import smdist.tensorflow as smd
from smdist.errors import ConfigurationError
from tests.tensorflow.keras_jobs import (
    BATCH,
    KERAS_3,
    close,
    data,
    hooked,
    make_model,
    read,
    running_mean,
    training,
    way,
)

TRAIN, EVAL = smd.modes.TRAIN, smd.modes.EVAL
INSIDE = ["weights", "gradients"]


def endless(x: Any, y: Any) -> Any:
    """A dataset whose size nobody knows."""

    def batches() -> Iterator[tuple[Any, Any]]:
        for start in range(0, len(x), BATCH):
            yield x[start : start + BATCH], y[start : start + BATCH]

    spec = (
        tf.TensorSpec((None, x.shape[1]), tf.float32),
        tf.TensorSpec((None, y.shape[1]), tf.float32),
    )
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


@pytest.mark.parametrize("interval", [5, 7], ids=["due", "not due"])  # what would come next
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "results"])
@pytest.mark.parametrize("name", ["eager", "compiled", "inline"])
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_the_end_of_an_epoch_is_no_step(
    tmp_path: Path, name: str, inside: bool, interval: int
) -> None:
    x, y = data()
    options, place = way(name)
    model = make_model(**options)
    wanted = INSIDE if inside else []
    with hooked(tmp_path / "run", interval, include_collections=wanted, **place) as hook:
        model.fit(endless(x, y), epochs=3, verbose=0, shuffle=False, callbacks=[hook])
        model.evaluate(endless(x, y), verbose=0, callbacks=[hook])
        assert hook.mode_steps[TRAIN] == 14
        assert hook.mode_steps[EVAL] == 4
    trial = read(tmp_path / "run")
    due = list(range(0, 15, interval))
    assert trial.steps(mode=TRAIN) == due
    assert trial.steps(mode=EVAL) == [0]
    if inside:
        steps = [step for epoch in training(x, y, epochs=3) for step in epoch]
        for number in due:
            kernel = trial.tensor("top/weights/top/kernel:0").value(number, mode=TRAIN)
            close(kernel, steps[number].weights["w2"])


def test_schedules_of_their_own_and_of_modes(tmp_path: Path) -> None:
    x, y = data()
    model = make_model()
    config = smd.SaveConfig(
        {
            TRAIN: smd.SaveConfigMode(save_interval=3),
            EVAL: smd.SaveConfigMode(save_steps=[1], save_interval=100, start_step=100),
        }
    )
    with smd.KerasHook(
        tmp_path / "run", save_config=config, include_collections=["gradients"], on_error="raise"
    ) as hook:
        hook.get_collection("gradients").save_config = smd.SaveConfig(save_steps=[4], end_step=0)
        hook.get_collection("metrics").save_config.end_step = 0  # type: ignore[union-attr]
        for _ in range(2):
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
            model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor("mae").steps(mode=TRAIN) == []
    assert trial.tensor("loss").steps(mode=TRAIN) == [0, 3, 6, 9]
    assert trial.tensor("loss").steps(mode=EVAL) == [1]
    assert trial.tensor("gradients/top/kernelGrad").steps(mode=TRAIN) == [4]
    # Five steps of training come before the first ones of evaluation.
    assert trial.global_step(EVAL, 1) == 6
    assert trial.global_step(TRAIN, 6) == 11


@pytest.mark.parametrize("samples", [20, 18], ids=["even", "a rest"])
def test_steps_per_execution(tmp_path: Path, samples: int) -> None:
    x, y = data(samples)
    model = make_model(steps_per_execution=2)
    with hooked(tmp_path / "run", interval=3, include_collections=INSIDE) as hook:
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[hook])
        model.predict(x, batch_size=BATCH, verbose=0, callbacks=[hook])
        assert hook.mode_steps[TRAIN] == 9
        assert hook.mode_steps[smd.modes.PREDICT] == 4
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0, 3, 6, 9]
    steps = [step for epoch in training(x, y, epochs=2) for step in epoch]
    for number in (0, 3, 6, 9):
        gradient = trial.tensor("gradients/hidden/kernelGrad").value(number, mode=TRAIN)
        close(gradient, steps[number].gradients["w1"])
    close(model.get_weights()[2], steps[-1].updated["w2"])


def test_what_is_out_of_reach_among_several_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A function of our own might call collectives that the others do not know."""
    x, y = data()
    options, place = way("inline")
    model = make_model(steps_per_execution=2, **options)
    hook = smd.KerasHook(
        tmp_path / "run",
        save_config=smd.SaveConfig(save_interval=3),
        include_collections=INSIDE,
        **place,
    )
    with caplog.at_level(logging.WARNING, logger="smdist"), hook:
        model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[hook])
        assert hook.mode_steps[TRAIN] == 9
    assert "steps_per_execution runs several steps as one" in caplog.text
    trial = read(tmp_path / "run")
    assert set(trial.tensor_names()) == {"loss", "mae"}
    # An execution of two steps ends with one result.
    found = trial.tensor("loss").values(mode=TRAIN)
    assert list(found) == [0, 3, 6, 9]
    means = [
        mean for epoch in training(x, y, epochs=2) for mean in running_mean([s.loss for s in epoch])
    ]
    close(list(found.values()), [means[step] for step in (1, 3, 6, 9)])


@pytest.mark.parametrize(("interval", "due"), [(2, [0, 2, 4]), (1, [1, 3, 4]), (4, [0, 4])])
def test_a_result_of_several_steps_is_saved_once(
    tmp_path: Path, interval: int, due: list[int]
) -> None:
    """At the last of them that is due."""
    x, y = data()
    options, place = way("inline")
    model = make_model(steps_per_execution=2, **options)
    with hooked(tmp_path / "run", interval=interval, **place) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    found = read(tmp_path / "run").tensor("loss").values(mode=TRAIN)
    assert list(found) == due
    means = running_mean([step.loss for step in training(x, y)[0]])
    close(list(found.values()), [means[min(step | 1, 4)] for step in due])


def test_training_goes_as_without_a_hook(tmp_path: Path) -> None:
    x, y = data()
    plain, captured = make_model(), make_model()
    options = {"batch_size": BATCH, "epochs": 3, "shuffle": False, "verbose": 0}
    history = plain.fit(x, y, validation_data=(x, y), **options).history
    with hooked(tmp_path / "run", interval=2, save_all=True) as hook:
        found = captured.fit(x, y, validation_data=(x, y), callbacks=[hook], **options).history
        outputs = captured.predict(x, batch_size=BATCH, verbose=0, callbacks=[hook])
    assert history.keys() == found.keys()
    for name, values in history.items():
        close(found[name], values)
    for one, other in zip(plain.get_weights(), captured.get_weights(), strict=True):
        close(one, other)
    close(outputs, plain.predict(x, batch_size=BATCH, verbose=0))


@pytest.mark.parametrize("name", ["compiled", "plain", "inline"])
def test_nothing_is_traced_again(tmp_path: Path, name: str) -> None:
    x, y = data()
    calls = 0

    class Counting(tf.keras.layers.Dense):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            nonlocal calls
            calls += 1  # Python runs while a function is traced, and not when it is called
            return super().call(inputs)

    options, place = way(name)
    model = tf.keras.Sequential([tf.keras.Input(shape=(3,)), Counting(2, name="top")])
    model.compile(optimizer="adam", loss="mse", **options)
    with hooked(tmp_path / "run", interval=2, save_all=True, **place) as hook:
        seen = []
        for _ in range(4):
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
            model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
            model.predict(x, batch_size=BATCH, verbose=0, callbacks=[hook])
            seen.append(calls)
        assert seen[0] > 0
        assert seen[1:] == seen[:1] * 3
    trial = read(tmp_path / "run")
    assert trial.tensor("top/outputs").steps(mode=TRAIN) == list(range(0, 20, 2))
    assert trial.tensor("top/outputs").steps(mode=EVAL) == list(range(0, 20, 2))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:You are saving your model:UserWarning")
def test_only_instances_are_touched_and_only_during_a_step(tmp_path: Path) -> None:
    x, y = data(8)
    model = make_model()
    targets = [model, model.optimizer, *model.layers]
    before = [set(vars(target)) for target in targets]
    classes = [dict(vars(type(target))) for target in targets]

    class Looking(tf.keras.callbacks.Callback):  # type: ignore[misc]
        looked = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            names = {"call", "compute_loss", "apply", "apply_gradients"}
            assert not any(names & set(vars(target)) for target in targets)
            Looking.looked += 1

    with hooked(tmp_path / "run", save_all=True) as hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook, Looking()])
        assert type(model.train_function).__module__.partition(".")[0] != "smdist"
        assert [dict(vars(type(t))) for t in targets] == classes
        model.save(tmp_path / ("model.keras" if KERAS_3 else "model.h5"))
    assert Looking.looked == 2
    names = {"call", "compute_loss", "apply", "apply_gradients"}
    assert [set(vars(t)) & names for t in targets] == [b & names for b in before]


def told_closed(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "is closed: nothing more" in message]


def test_a_hook_that_is_closed_or_switched_off_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(8)
    model = make_model()
    hook = hooked(tmp_path / "run")
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    hook.close()
    hook.close()
    assert not told_closed(caplog)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    hook.save_scalar("late", 1.0)
    run = tmp_path / "run"
    (told,) = told_closed(caplog)
    assert told.startswith(f"the hook of {run} is closed: nothing more is captured by it; ")
    assert read(run).steps(mode=TRAIN) == [0, 1]
    caplog.clear()
    monkeypatch.setenv("USE_SMDIST", "0")
    with hooked(tmp_path / "off", save_all=True) as off:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[off])
    off.save_scalar("late", 1.0)
    assert not (tmp_path / "off").exists()
    assert not told_closed(caplog)


@pytest.mark.parametrize(
    "use", ["tape", "traced", "tensor", "output", "evaluate", "model", "optimizer"]
)
def test_what_a_closed_hook_is_used_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, use: str
) -> None:
    x, y = data(8)
    with hooked(tmp_path / "run") as hook:
        hook.save_scalar("mine", 1.0)

    def tape() -> Any:
        with hook.wrap_tape(tf.GradientTape()) as tape:
            loss = variable * variable
        return tape.gradient(loss, variable)

    variable = tf.Variable(3.0)
    if use in ("tape", "traced"):
        assert (tape if use == "tape" else tf.function(tape))() == 6.0
    elif use == "evaluate":
        make_model().evaluate(x, y, verbose=0, callbacks=[hook])
    elif use == "tensor":
        hook.save_tensor("late", x)
    elif use == "model":
        hook.register_model(make_model())
    elif use == "optimizer":
        optimizer = make_model().optimizer
        assert hook.wrap_optimizer(optimizer) is optimizer
    else:
        hook.record_tensor_value("late", x)
    assert len(told_closed(caplog)) == 1


def test_a_rank_that_saves_nothing_is_not_told_that_its_hook_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = hooked(tmp_path / "run", rank=1, world_size=2)
    hook.close()
    hook.save_scalar("late", 1.0)
    assert not told_closed(caplog)


def test_a_hook_that_the_end_of_the_process_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = hooked(tmp_path / "run")
    hook.save_scalar("mine", 1.0)
    hook._core.at_exit("")
    hook.save_scalar("late", 1.0)
    assert not told_closed(caplog)
    assert read(tmp_path / "run").tensor_names() == ["scalar/mine"]


@pytest.mark.parametrize("kind", ["evaluator", "ps"])
def test_a_task_that_trains_nothing_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    cluster = {"worker": ["a:1", "b:1"], kind: ["c:1"]}
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})
    )
    x, y = data(8)
    with (
        caplog.at_level(logging.WARNING, logger="smdist"),
        hooked(tmp_path / "run", save_all=True) as hook,
    ):
        make_model().evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
        hook.save_scalar("mine", 1.0)
    assert f"nothing is saved by this process: a task of type '{kind}'" in caplog.text
    assert not (tmp_path / "run").exists()


def test_a_hook_that_closes_within_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y = data()
    model = make_model()
    hook = hooked(tmp_path / "run", include_collections=INSIDE)

    class Closing(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 2:
                hook.close()

    given = {"shuffle": False, "verbose": 0, "validation_data": (x, y)}
    model.fit(x, y, batch_size=BATCH, callbacks=[hook, Closing()], **given)
    assert not told_closed(caplog)
    assert read(tmp_path / "run").steps(mode=TRAIN) == [0, 1, 2]
    close(model.get_weights()[0], training(x, y)[0][-1].updated["w1"])


def test_recompiling_and_a_second_model(tmp_path: Path) -> None:
    x, y = data(8)
    model, other = make_model(), make_model()
    with hooked(tmp_path / "run", include_collections=INSIDE) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        model.compile(optimizer=tf.keras.optimizers.SGD(0.5), loss="mae")
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        other.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.steps(mode=TRAIN) == [0, 1, 2, 3, 4, 5]
    weights, gradients = (
        trial.tensor(n) for n in ("top/weights/top/kernel:0", "gradients/top/kernelGrad")
    )
    for step, rate in ((0, 0.1), (2, 0.5), (4, 0.1)):
        after = weights.value(step, mode=TRAIN) - rate * gradients.value(step, mode=TRAIN)
        close(weights.value(step + 1, mode=TRAIN), after)


def test_what_cannot_be_seen_is_said_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = data(8)

    class Hidden(tf.keras.layers.Layer):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.inner = tf.keras.layers.Dense(2, name="inner")

        def build(self, shape: Any) -> None:
            self.inner.build(shape)
            super().build(shape)

        def call(self, inputs: Any) -> Any:
            def each(row: Any) -> Any:
                return self.inner(row[None])[0]

            return tf.map_fn(each, inputs, fn_output_signature=tf.float32)

    model = tf.keras.Sequential([tf.keras.Input(shape=(3,)), Hidden(name="outer")])
    model.compile(optimizer="sgd", loss="mse", jit_compile=False)
    hook = smd.KerasHook(
        tmp_path / "run",
        include_collections=["layers"],
        save_config=smd.SaveConfig(save_interval=1),
    )
    with caplog.at_level(logging.WARNING, logger="smdist"), hook:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
    assert "outer/inner/outputs is not captured: it is computed inside a tf.function" in caplog.text
    trial = read(tmp_path / "run")
    assert trial.tensor("outer/outputs").steps(mode=TRAIN) == [0, 1]


def test_a_hook_from_a_configuration_file(tmp_path: Path) -> None:
    document = {
        "LocalPath": str(tmp_path / "run"),
        "HookParameters": {"train.save_interval": "2", "eval.save_interval": "3"},
        "CollectionConfigurations": [
            {"CollectionName": "gradients", "CollectionParameters": {"reductions": "mean"}},
            {"CollectionName": "mine", "CollectionParameters": {"include_regex": "top/outputs"}},
        ],
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    x, y = data()
    model = make_model()
    try:
        hook = smd.get_hook("keras", str(tmp_path / "config.json"), create_if_not_exists=True)
        assert isinstance(hook, smd.KerasHook)
        assert smd.get_hook() is hook
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
        model.evaluate(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
        hook.close()
    finally:
        smd.del_hook()
    trial = read(tmp_path / "run")
    gradient = trial.tensor("gradients/top/kernelGrad")
    expected = training(x, y)[0][2].gradients["w2"].mean()
    close(gradient.reduction_value(2, "mean", mode=TRAIN), expected)
    assert trial.tensor("top/outputs").steps(mode=TRAIN) == [0, 2, 4]
    assert trial.tensor("top/outputs").steps(mode=EVAL) == [0, 3]


def test_wrong_arguments_say_so(tmp_path: Path) -> None:
    wrong: Any
    with hooked(tmp_path / "run") as hook:
        with pytest.raises(ConfigurationError, match="wrap_optimizer takes an optimizer"):
            hook.wrap_optimizer("adam")
        with pytest.raises(ConfigurationError, match="wrap_tape takes a GradientTape"):
            hook.wrap_tape(None)
        with pytest.raises(ConfigurationError, match="has no name to be found by"):
            hook.add_to_collection("mine", 3)
        for wrong in ("hidden", None, tf.keras.layers.Dense):
            with pytest.raises(ConfigurationError, match="register_model takes a Keras model"):
                hook.register_model(wrong)
            with pytest.raises(ConfigurationError, match="'mine': add_keras_layer takes a layer"):
                hook.get_collection("mine").add_keras_layer(wrong)
        hook.register_model(tf.keras.Sequential([tf.keras.layers.Dense(1)]))  # not built
    for wrong in (-1, "soon", float("nan")):
        with pytest.raises(ConfigurationError, match="close_timeout_s"):
            smd.KerasHook(tmp_path / "run", close_timeout_s=wrong)


@pytest.mark.parametrize("way_of", ["fit", "loop"])
def test_a_layer_that_no_model_had(tmp_path: Path, way_of: str) -> None:
    x, y = data(8)
    model, other = make_model(), tf.keras.layers.Dense(1, name="elsewhere")
    variable = tf.Variable(1.0, name="alone")
    with hooked(tmp_path / "run", include_collections=["mine"]) as hook:
        mine = hook.get_collection("mine")
        mine.add_keras_layer(other)
        mine.add_keras_layer(model.layers[0])
        mine.add([variable, model.layers[0].kernel])
        hook.get_collection("not_saved").add_keras_layer(other)
        if way_of == "fit":
            model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[hook])
        else:
            hook.register_model(model)
            with hook.wrap_tape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            tape.gradient(loss, model.trainable_variables)
        mine.add_keras_layer(model.layers[1])  # too late, but it has one
    trial = read(tmp_path / "run")
    assert {"hidden/outputs", "hidden/weights/hidden/kernel:0"} <= set(trial.tensor_names())
    told = [message for found in trial.troubles().values() for message in found]
    assert told == [
        "collection mine asked for layer elsewhere, but no model had it",
        f"collection mine asked for variable {variable.name}, but no model had it",
    ]


def test_mixed_precision(tmp_path: Path) -> None:
    """Gradients are those of the loss, whatever it was multiplied with for their sake."""
    x, y = data(8)
    policy = "mixed_float16"
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input(shape=(3,)),
            layers.Dense(4, dtype=policy, name="half"),
            layers.Dense(2, dtype="float32", name="top"),
        ]
    )
    optimizer = tf.keras.optimizers.SGD(0.1)
    # Half precision has no room for much more, and a step that overflows changes nothing.
    scaling = tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=256.0)
    model.compile(optimizer=scaling, loss="mse", jit_compile=False)
    with hooked(tmp_path / "run", include_collections=["weights", "gradients", "layers"]) as hook:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[hook])
    trial = read(tmp_path / "run")
    assert trial.tensor("half/outputs").value(0, mode=TRAIN).dtype == np.float16
    weights, gradients = (
        trial.tensor(n) for n in ("half/weights/half/kernel:0", "gradients/half/kernelGrad")
    )
    after = weights.value(0, mode=TRAIN) - 0.1 * gradients.value(0, mode=TRAIN)
    np.testing.assert_allclose(weights.value(1, mode=TRAIN), after, rtol=1e-3, atol=1e-4)
