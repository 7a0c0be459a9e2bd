from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.config.save_config import SaveConfig
from smdist.config.save_config_mode import SaveConfigMode
from smdist.config.schedule import NEVER, Schedule
from smdist.errors import ConfigurationError, UnknownKey
from smdist.identity import ModeKeys

TRAIN, EVAL, PREDICT, GLOBAL = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT, ModeKeys.GLOBAL


def saved(config: SaveConfig, upto: int, mode: ModeKeys = GLOBAL) -> list[int]:
    return [step for step in range(upto) if config.should_save_step(mode, step)]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({}, [0, 500, 1000]),
        ({"save_interval": 400}, [0, 400, 800]),
        ({"save_interval": 100, "end_step": 200}, [0, 100]),
        ({"save_interval": 100, "end_step": 201}, [0, 100, 200]),
        ({"save_interval": 300, "start_step": 350}, [600, 900]),
        ({"save_steps": [7, 3]}, [0, 3, 7, 500, 1000]),
        ({"end_step": 0}, []),
        ({"end_step": 0, "save_steps": [5]}, [5]),
    ],
)
def test_documented_examples(arguments: dict[str, Any], steps: list[int]) -> None:
    assert saved(SaveConfig(**arguments), 1001) == steps


schedules = st.builds(
    Schedule,
    save_interval=st.integers(1, 40),
    start_step=st.integers(0, 60),
    end_step=st.none() | st.integers(0, 90),
    save_steps=st.sets(st.integers(0, 120), max_size=5).map(lambda s: tuple(sorted(s))),
)


@given(schedules, st.integers(0, 130))
def test_next_due_is_the_first_hit_of_the_rule(schedule: Schedule, step: int) -> None:
    def hit(s: int) -> bool:
        within = schedule.start_step <= s and (schedule.end_step is None or s < schedule.end_step)
        return s in schedule.save_steps or (within and s % schedule.save_interval == 0)

    expected = next((s for s in range(step, 300) if hit(s)), NEVER)
    assert schedule.next_due(step) == expected
    assert schedule.should_save(step) == hit(step)


def test_next_due_of_a_huge_step_is_fast() -> None:
    assert Schedule(save_interval=7).next_due(10**15) == 10**15 + (-(10**15)) % 7


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("save_interval", 0),
        ("save_interval", -5),
        ("save_interval", 1.5),
        ("save_interval", "often"),
        ("save_interval", True),
        ("start_step", -1),
        ("end_step", -1),
        ("end_step", [3]),
        ("save_steps", [1, -2]),
        ("save_steps", 3),
        ("save_steps", ["a"]),
        ("save_steps", {"a": 1}),
    ],
)
def test_wrong_values_are_named_at_construction_and_assignment(key: str, value: Any) -> None:
    for build in (SaveConfig, SaveConfigMode):
        with pytest.raises(ConfigurationError, match=f"{build.__name__}: {key}="):
            build(**{key: value})
        config = build()
        with pytest.raises(ConfigurationError, match=key):
            setattr(config, key, value)
        assert config == build()


def test_text_and_integral_floats_are_numbers() -> None:
    assert SaveConfig(save_interval="10", save_steps="3, 1").save_steps == [1, 3]  # type: ignore[arg-type]
    assert SaveConfig(save_interval=10.0).save_interval == 10  # type: ignore[arg-type]


def test_misspelt_attribute_is_an_error() -> None:
    with pytest.raises(UnknownKey, match="did you mean 'save_interval'"):
        SaveConfig().save_intervall = 3
    with pytest.raises(UnknownKey, match="'end_step'"):
        SaveConfigMode.from_dict({"end_stp": 3})


def test_unknown_modes_and_kinds() -> None:
    with pytest.raises(ConfigurationError, match="'trian' is not a mode"):
        SaveConfig({"trian": {}})
    with pytest.raises(ConfigurationError, match="is not a SaveConfigMode"):
        SaveConfig({TRAIN: 3})
    with pytest.raises(ConfigurationError, match="not a dict of mode"):
        SaveConfig([TRAIN])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="save_config=3 is not a SaveConfig"):
        SaveConfig.parse(3)


def test_given_modes_are_complete_others_use_plain_settings() -> None:
    config = SaveConfig({TRAIN: SaveConfigMode(save_interval=1), "eval": {"end_step": 2}})
    assert saved(config, 3, TRAIN) == [0, 1, 2]
    assert saved(config, 501, EVAL) == [0]
    assert saved(config, 501, PREDICT) == [0, 500]
    both = SaveConfig({TRAIN: SaveConfigMode(end_step=2)}, save_interval=3)
    assert both.schedule(TRAIN) == Schedule(end_step=2)
    assert both.schedule(GLOBAL) == Schedule(save_interval=3)


def test_assigning_a_plain_setting_reaches_every_mode() -> None:
    config = SaveConfig({TRAIN: SaveConfigMode(save_interval=1)}, save_interval=4)
    config.get_save_config(EVAL).save_interval = 2
    config.get_save_config(EVAL).end_step = 50
    config.end_step = 0
    assert [saved(config, 100, mode) for mode in ModeKeys] == [[], [], [], []]
    assert [config.schedule(m).save_interval for m in (TRAIN, EVAL, GLOBAL)] == [1, 2, 4]
    config.end_step = None
    assert saved(config, 3, TRAIN) == [0, 1, 2]


def test_one_mode_can_be_changed_alone() -> None:
    config = SaveConfig(save_interval=5)
    config.get_save_config(TRAIN).start_step = 10
    config.mode_save_configs[EVAL].save_interval = 2
    config.set_save_config(PREDICT, SaveConfigMode(end_step=0))
    assert config.schedule(TRAIN) == Schedule(5, 10)
    assert config.schedule(EVAL) == Schedule(2)
    assert config.schedule(PREDICT) == Schedule(end_step=0)
    assert config.schedule(GLOBAL) == Schedule(5)


def test_save_steps_can_be_edited_in_place() -> None:
    config = SaveConfig(save_steps=[9])
    config.save_steps.append(4)
    assert config.save_steps == [4, 9]
    assert saved(config, 10) == [0, 4, 9]
    with pytest.raises(ConfigurationError, match="save_steps=-1"):
        config.save_steps.append(-1)
    assert config.save_steps == [4, 9]


def test_unset_settings_fall_back_and_layers_stay_separate() -> None:
    hook = SaveConfig.partial({"save_interval": 10, "end_step": 90}, {EVAL: {"save_interval": 20}})
    child = SaveConfig.partial({"start_step": 5}, {EVAL: {"start_step": 6}}, fallback=hook)
    assert child.schedule(TRAIN) == Schedule(10, 5, 90)
    assert child.schedule(EVAL) == Schedule(20, 6, 90)
    hook.end_step = 50
    child.save_interval = 1
    assert child.schedule(EVAL) == Schedule(1, 6, 50)
    assert hook.schedule(EVAL) == Schedule(20, 0, 50)
    child.end_step = None
    assert child.schedule(TRAIN).end_step is None


def test_modes_that_are_not_set_follow_the_hook() -> None:
    hook = SaveConfig(save_interval=10)
    own = SaveConfig({TRAIN: SaveConfigMode(save_interval=1)})
    own.get_save_config(EVAL).start_step = 3
    joined = own.with_fallback(hook)
    assert joined.schedule(TRAIN).save_interval == 1
    assert joined.schedule(EVAL) == Schedule(10, 3)
    assert joined.schedule(GLOBAL).save_interval == 10
    own.end_step = 7  # the script's own object stays connected
    assert joined.schedule(GLOBAL) == Schedule(10, end_step=7)
    assert joined.schedule(EVAL) == Schedule(10, 3, 7)
    complete = SaveConfig(end_step=4)
    assert complete.with_fallback(hook) is complete


def test_framework_default_applies_only_to_unset_settings() -> None:
    assert SaveConfig(end_step=20).with_default_interval(10).schedule(TRAIN) == Schedule(10, 0, 20)
    given = SaveConfig(save_interval=500)
    assert given.with_default_interval(10) is given
    plain = SaveConfig()
    assert plain.with_default_interval(500) is plain


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def changed(self) -> None:
        self.count += 1


def test_changes_notify_listeners_but_reads_do_not() -> None:
    hook = SaveConfig()
    mode = SaveConfigMode()
    config = SaveConfig({TRAIN: mode}).with_fallback(hook)
    listener = Counter()
    config.watch(listener)
    _ = (config.save_steps, config.schedule(EVAL), config.mode_save_configs, config.to_dict())
    assert listener.count == 0
    changes: tuple[Callable[[], object], ...] = (
        lambda: setattr(mode, "save_interval", 2),
        lambda: setattr(config, "end_step", 2),
        lambda: setattr(config.get_save_config(PREDICT), "start_step", 2),
        lambda: config.set_save_config(EVAL, SaveConfigMode()),
        lambda: config.save_steps.extend([5]),
    )
    for change in changes:
        before = listener.count
        change()
        assert listener.count > before
    config.unwatch(listener)
    before = listener.count
    config.end_step = 3
    assert listener.count == before


def test_listeners_are_not_kept_alive() -> None:
    config = SaveConfig()
    config.watch(Counter())
    config.end_step = 1
    assert not config._layer._listeners


configs = st.builds(
    SaveConfig,
    mode_save_configs=st.none()
    | st.dictionaries(
        st.sampled_from(ModeKeys), st.builds(SaveConfigMode, save_interval=st.integers(1, 9))
    ),
    save_interval=st.none() | st.integers(1, 9),
    end_step=st.none() | st.integers(0, 9),
    save_steps=st.none() | st.lists(st.integers(0, 9)),
)


@given(configs)
def test_copies_are_equal_and_independent(config: SaveConfig) -> None:
    duplicates = [
        config.copy(),
        copy.copy(config),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        SaveConfig.from_dict(config.to_dict()),
        SaveConfig.from_json(config.to_json()),
    ]
    for duplicate in duplicates:
        assert duplicate == config
        duplicate.start_step = 77
        assert duplicate != config


def test_copy_does_not_follow_the_fallback() -> None:
    hook = SaveConfig(save_interval=3)
    child = SaveConfig.partial({"end_step": 9}, fallback=hook)
    twin = child.copy()
    hook.save_interval = 4
    assert twin.schedule(TRAIN) == Schedule(3, 0, 9)


def test_parse_accepts_the_types_that_hooks_accept() -> None:
    assert SaveConfig.parse(None) == SaveConfig()
    one = SaveConfigMode(save_interval=2)
    assert all(SaveConfig.parse(one).schedule(mode).save_interval == 2 for mode in ModeKeys)
    assert SaveConfig.parse({TRAIN: one}).schedule(EVAL) == Schedule()
    assert SaveConfig.parse({"save_interval": 2}).schedule(EVAL) == Schedule(2)
    assert one.should_save_step(4)
    assert not SaveConfig().should_save_step(TRAIN, 3)
    assert copy.deepcopy(one) == one == pickle.loads(pickle.dumps(one))


def test_merge_default_applies_to_unset_modes() -> None:
    config = SaveConfig({TRAIN: SaveConfigMode(save_interval=2)})
    default = SaveConfig(save_interval=7)
    listener = Counter()
    config.watch(listener)
    config.merge_default_save_config(default_save_config=default)
    assert listener.count
    default.save_interval = 8  # it was copied
    assert config.schedule(TRAIN) == Schedule(2)
    assert config.schedule(EVAL) == Schedule(7)
    assert config.with_fallback(SaveConfig(save_interval=9)) is config
    complete = SaveConfig(end_step=3)
    complete.merge_default_save_config(default)
    assert complete.schedule(EVAL) == Schedule(end_step=3)


def test_smdebug_methods() -> None:
    one = SaveConfigMode.from_dict({"save_interval": 2}, default_values={"end_step": 5})
    assert one.schedule() == Schedule(2, end_step=5)
    config = SaveConfig.from_save_config_mode(save_config_mode=one)
    assert config.should_save_step(mode=EVAL, step_num=4)
    assert dict(config.mode_save_configs) == dict.fromkeys(ModeKeys, one)
    config.mode_save_configs[TRAIN].save_interval = 3
    assert config.schedule(TRAIN).save_interval == 3
    with pytest.raises(TypeError):
        config.mode_save_configs[TRAIN] = one  # type: ignore[index]
    filled = SaveConfig.from_dict({"TRAIN": {"start_step": 1}}, default_values={"end_step": 5})
    assert filled.schedule(TRAIN) == Schedule(start_step=1, end_step=5)
    assert SaveConfig.from_dict({"end_step": 2}, {"save_interval": 4}).end_step == 2
    assert SaveConfig.parse(obj=config) is config
