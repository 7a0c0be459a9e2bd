from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smdist.config import PYTORCH, Framework, HookConfig
from smdist.config.collection import Collection
from smdist.config.hook_config import CONFIG_VARIABLE, SAGEMAKER_OUT_DIR
from smdist.config.parameters import PARAMETERS, Scope, keys_in
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.config.save_config_mode import SaveConfigMode
from smdist.config.schedule import SAVE_KEYS, Schedule
from smdist.errors import ConfigurationError, NoConfigurationFile, UnknownKey
from smdist.identity import ModeKeys
from smdist.workers.hook.process_settings import ProcessSettings

TRAIN, EVAL, PREDICT, GLOBAL = ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT, ModeKeys.GLOBAL
TEN = Framework("ten", collections={"metrics": ("m",)}, always=("metrics",), save_interval=10)


def from_json(
    hook: Any = None, collections: Any = None, framework: Framework = PYTORCH, **top: Any
) -> HookConfig:
    document = {"LocalPath": "out", "HookParameters": hook, "CollectionConfigurations": collections}
    return HookConfig.from_json(framework, {**document, **top}, source="x.json", environ={})


def collection_of(config: HookConfig, name: str) -> Collection:
    return config.build_manager().get(name)


def schedule_of(config: HookConfig, name: str, mode: ModeKeys) -> Schedule:
    found = collection_of(config, name).save_config
    assert found is not None
    return found.schedule(mode)


# -- Python ------------------------------------------------------------------------------------


def test_arguments_and_their_defaults() -> None:
    config = HookConfig.from_arguments(PYTORCH, out_dir=Path("/a/b"))
    assert config.out_dir == "/a/b"
    assert config.include_workers == "one"
    assert config.active_collections == ("losses",)
    assert config.save_config == SaveConfig()
    assert (config.dry_run, config.save_all, config.export_tensorboard) == (False, False, False)
    assert config.tensorboard_dir is None
    assert config.on_full == "block"


def test_home_expands_and_urls_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert HookConfig.from_arguments(PYTORCH, out_dir="~/x").out_dir == "/home/me/x"
    assert HookConfig.from_arguments(PYTORCH, out_dir="s3://b/~p").out_dir == "s3://b/~p"
    assert HookConfig.from_arguments(PYTORCH, out_dir="file:///x").out_dir == "file:///x"


def test_relative_paths_resolve_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = HookConfig.from_arguments(PYTORCH, out_dir="run", tensorboard_dir="../tb")
    assert config.out_dir == f"{tmp_path}/run"
    assert config.tensorboard_dir == f"{tmp_path}/../tb"
    assert HookConfig.from_json(PYTORCH, {"LocalPath": "run"}, environ={}).out_dir == config.out_dir


def test_removed_working_directory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigurationError, match=r"out_dir='run'.* absolute path"):
        HookConfig.from_arguments(PYTORCH, out_dir="run")
    assert HookConfig.from_arguments(PYTORCH, out_dir="/run").out_dir == "/run"


@pytest.mark.parametrize(
    ("arguments", "directory"),
    [
        ({"export_tensorboard": True}, "/o/tensorboard"),
        ({"tensorboard_dir": "/tb"}, "/tb"),
        ({"export_tensorboard": True, "tensorboard_dir": "/tb"}, "/tb"),
        ({}, None),
    ],
)
def test_tensorboard_directory(arguments: dict[str, Any], directory: str | None) -> None:
    config = HookConfig.from_arguments(PYTORCH, out_dir="/o", **arguments)
    assert config.tensorboard_dir == directory
    assert config.export_tensorboard == (directory is not None)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("one", "one"),
        ("ALL", "all"),
        ([3, 0, 3], (0, 3)),
        (range(2), (0, 1)),
        ("0, 2", (0, 2)),
        (4, (4,)),
    ],
)
def test_include_workers(given: Any, read: Any) -> None:
    config = HookConfig.from_arguments(PYTORCH, out_dir="o", include_workers=given)
    assert config.include_workers == read


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pytorch hook: out_dir is missing"),
        ({"out_dir": ""}, "out_dir='' is not a path"),
        ({"out_dir": 3}, "out_dir=3 is not a path"),
        ({"include_workers": "some"}, "include_workers='some' .*'one', 'all' or a list of ranks"),
        ({"include_workers": []}, "selects no rank"),
        ({"include_workers": [-1]}, "include_workers"),
        ({"include_workers": True}, "include_workers=True"),
        ({"include_regex": "("}, "include_regex '\\(' .* at position 0"),
        ({"include_collections": 3}, "include_collections=3"),
        ({"save_config": 3}, "save_config=3 is not a SaveConfig"),
        ({"reduction_config": 3}, "reduction_config=3"),
        ({"save_all": "perhaps"}, "save_all='perhaps' is neither true nor false"),
        ({"dry_run": 2}, "dry_run=2"),
        ({"on_full": "wait"}, "on_full='wait' .*'block', 'drop'"),
        ({"buffer_bytes": 0}, "buffer_bytes=0 is too small"),
        ({"linger_s": -1}, "linger_s=-1"),
        ({"linger_s": "soon"}, "linger_s='soon' is not a number"),
        ({"linger_s": float("nan")}, "linger_s=nan is not a number; give one of at least 0"),
        ({"linger_s": float("inf")}, "linger_s=inf is infinite; give a finite number"),
        ({"linger_s": 10**400}, "linger_s=10*0 is not a number"),
        ({"drain_deadline_s": float("inf")}, "drain_deadline_s=inf is infinite"),
        ({"drain_deadline_s": "Infinity"}, "drain_deadline_s='Infinity' is infinite"),
        ({"drain_deadline_s": "nan"}, "drain_deadline_s='nan' is not a number"),
        ({"drain_deadline_s": -0.5}, "drain_deadline_s=-0.5 is too small"),
        ({"overhead_budget": float("nan")}, "overhead_budget=nan"),
        ({"overhead_budget": float("inf")}, "overhead_budget=inf"),
        ({"buffer_bytes": float("inf")}, "buffer_bytes=inf is not a whole number"),
    ],
)
def test_wrong_arguments_name_key_and_remedy(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HookConfig.from_arguments(PYTORCH, **({"out_dir": "o", **arguments} if arguments else {}))


def test_relative_path_in_a_removed_directory_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    why = "relative to a directory that was removed"
    with pytest.raises(ConfigurationError, match=f"out_dir='run': it is {why}; give an absolute"):
        HookConfig.from_arguments(PYTORCH, out_dir="run")
    with pytest.raises(ConfigurationError, match=rf"spool_dir='spools' .*{why}\); use a dir"):
        ProcessSettings.read(spool_dir="spools")
    assert HookConfig.from_arguments(PYTORCH, out_dir=tmp_path).out_dir == str(tmp_path)


def test_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(UnknownKey, match="did you mean 'include_collections'"):
        HookConfig.from_arguments(PYTORCH, out_dir="o", include_collection=["weights"])
    with pytest.raises(UnknownKey):  # JSON only
        HookConfig.from_arguments(PYTORCH, out_dir="o", save_interval=3)


def test_active_collections_are_a_union() -> None:
    config = HookConfig.from_arguments(
        PYTORCH,
        out_dir="o",
        include_collections=["weights", ["losses", "mine"]],
        include_regex="a,b",
        save_all=True,
    )
    assert config.active_collections == ("losses", "weights", "mine", "default", "all")
    assert config.include_regex == ("a,b",)  # in Python text is one expression
    assert collection_of(config, "default").include_regex == ["a,b"]


def test_framework_interval_in_python_and_json() -> None:
    def schedule(**arguments: Any) -> Schedule:
        config = HookConfig.from_arguments(TEN, out_dir="o", **arguments)
        return schedule_of(config, "metrics", TRAIN)

    assert schedule() == Schedule(10)
    assert schedule(save_config=SaveConfig(end_step=3)) == Schedule(10, 0, 3)
    assert schedule(save_config=SaveConfig(save_interval=7)) == Schedule(7)
    config = from_json({"eval.end_step": 4}, framework=TEN)
    assert schedule_of(config, "metrics", EVAL) == Schedule(10, 0, 4)
    assert schedule_of(config, "metrics", TRAIN) == Schedule(10)


def test_the_script_s_own_save_config_stays_connected() -> None:
    mine = SaveConfig({TRAIN: SaveConfigMode(save_interval=2)})
    manager = HookConfig.from_arguments(PYTORCH, out_dir="o", save_config=mine).build_manager()
    losses = manager.get("losses").save_config
    assert losses is not None
    mine.get_save_config(TRAIN).save_interval = 3
    assert losses.schedule(TRAIN).save_interval == 3


# -- JSON --------------------------------------------------------------------------------------

SEED_HOOK_KEYS = [
    "dry_run", "save_all", "include_workers", "include_regex", "reductions", "save_raw_tensor",
    "save_shape", *SAVE_KEYS, *(f"{m.name.lower()}.{k}" for m in ModeKeys for k in SAVE_KEYS),
]  # fmt: skip
SEED_COLLECTION_KEYS = [
    "include_regex", "save_histogram", "reductions", "save_raw_tensor", *SAVE_KEYS,
    *(f"{m.name.lower()}.{k}" for m in ModeKeys for k in SAVE_KEYS),
]  # fmt: skip


def test_every_documented_key_is_known() -> None:
    assert set(SEED_HOOK_KEYS) <= set(keys_in(Scope.HOOK))
    assert set(SEED_COLLECTION_KEYS) <= set(keys_in(Scope.COLLECTION))


def test_every_python_parameter_is_a_field() -> None:
    fields = set(HookConfig.__dataclass_fields__) - {"framework", "collections"}
    fields.add("export_tensorboard")  # follows from tensorboard_dir
    assert fields == {k for k, p in PARAMETERS.items() if Scope.PYTHON in p.scopes}


@pytest.mark.parametrize("as_text", [False, True])
def test_every_hook_parameter_works(as_text: bool) -> None:
    native = {
        "dry_run": True,
        "save_all": True,
        "include_workers": "all",
        "include_regex": ["relu", "tanh"],
        "include_collections": ["weights"],
        "reductions": ["min", "l1_norm", "abs_l2_norm", "abs_mean"],
        "save_raw_tensor": True,
        "save_shape": True,
        "save_interval": 3,
        "save_steps": [1, 2],
        "start_step": 4,
        "end_step": 40,
        "export_tensorboard": True,
        "tensorboard_dir": "/tb",
        "buffer_bytes": 1000,
        "on_error": "raise",
    }

    def text(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, list) else str(value)

    config = from_json({k: text(v) for k, v in native.items()} if as_text else native)
    assert config.dry_run
    assert config.save_all
    assert config.include_workers == "all"
    assert config.include_regex == ("relu", "tanh")
    assert config.active_collections == ("losses", "weights", "default", "all")
    assert config.reduction_config.names == {"min", "l1", "abs_l2", "abs_mean"}
    assert config.reduction_config.save_raw_tensor
    assert config.reduction_config.save_shape
    assert all(config.save_config.schedule(m) == Schedule(3, 4, 40, (1, 2)) for m in ModeKeys)
    assert config.tensorboard_dir == "/tb"
    assert config.buffer_bytes == 1000
    assert config.on_error == "raise"


@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from(["hook", "collection"]),
            st.sampled_from([None, *ModeKeys]),
            st.sampled_from(SAVE_KEYS[:3]),
        ),
        st.integers(1, 99),
    ),
    st.sampled_from(ModeKeys),
)
def test_precedence_key_by_key(settings: dict[Any, int], mode: ModeKeys) -> None:
    sections: dict[str, dict[str, str]] = {"hook": {}, "collection": {}}
    for (place, of_mode, key), value in settings.items():
        if key == "end_step":  # behind any start, or it would be refused
            value = settings[place, of_mode, key] = value + 100
        name = key if of_mode is None else f"{of_mode.name.lower()}.{key}"
        sections[place][name] = str(value)
    config = from_json(
        sections["hook"],
        [{"CollectionName": "weights", "CollectionParameters": sections["collection"]}],
    )
    found = schedule_of(config, "weights", mode)
    order = [("collection", mode), ("collection", None), ("hook", mode), ("hook", None)]
    for key in SAVE_KEYS[:3]:
        default = getattr(Schedule(), key)
        expected = next((settings[o, m, key] for o, m in order if (o, m, key) in settings), default)
        assert getattr(found, key) == expected


def test_collections_are_included_and_configured() -> None:
    config = from_json(
        {"reductions": "mean", "save_interval": 7},
        [
            {"CollectionName": "weights"},
            {"CollectionName": "biases", "CollectionParameters": None},
            {
                "CollectionName": "custom",
                "CollectionParameters": {
                    "include_regex": "relu|tanh,[0-9]{1,2}x",
                    "reductions": "variance,abs_max",
                    "save_histogram": "False",
                    "train.save_steps": "5,6",
                    "tensor_names": "a,b",
                },
            },
            {"CollectionName": "raw", "CollectionParameters": {"save_raw_tensor": "true"}},
            {"CollectionName": "losses", "CollectionParameters": {"end_step": 0}},
        ],
    )
    assert config.active_collections == ("losses", "weights", "biases", "custom", "raw")
    manager = config.build_manager()
    custom = manager.get("custom")
    assert custom.include_regex == ["relu|tanh", "[0-9]{1,2}x"]
    assert custom.tensor_names == {"a", "b"}
    assert not custom.save_histogram
    assert custom.reduction_config is not None
    assert custom.reduction_config.names == {"variance", "abs_max"}
    assert custom.save_config is not None
    assert custom.save_config.schedule(TRAIN) == Schedule(7, save_steps=(5, 6))
    assert custom.save_config.schedule(EVAL) == Schedule(7)
    raw = manager.get("raw").reduction_config
    assert raw == ReductionConfig(reductions=["mean"], save_raw_tensor=True)
    assert manager.get("weights").include_regex == ["^(?!gradient).*weight"]
    assert schedule_of(config, "losses", TRAIN).end_step == 0
    assert schedule_of(config, "weights", TRAIN).end_step is None


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("a,b", ("a", "b")),
        (["a,b", "c"], ("a,b", "c")),
        ('["a,b", "c"]', ("a,b", "c")),
        ("[0-9]+,x", ("[0-9]+", "x")),
        ("[1]", ("[1]",)),
        ("w{2,}", ("w{2,}",)),
        (" a , ,b ", ("a", "b")),
    ],
)
def test_regex_lists(given: Any, read: tuple[str, ...]) -> None:
    assert from_json({"include_regex": given}).include_regex == read


def test_repeated_collections_are_merged() -> None:
    entries = [
        {"CollectionName": "c", "CollectionParameters": {"save_interval": 2, "end_step": 9}},
        {"CollectionName": "c", "CollectionParameters": {"save_interval": 3}},
    ]
    assert schedule_of(from_json(None, entries), "c", TRAIN) == Schedule(3, 0, 9)


@pytest.mark.parametrize(
    ("hook", "collection", "where"),
    [
        ({"start_step": 10, "end_step": 5}, {}, "hook: start_step=10 .*end_step=5"),
        ({"train.start_step": 5, "end_step": 5}, {}, "hook: .* TRAIN"),
        ({"end_step": 5}, {"eval.start_step": "9"}, "collection 'c'.*EVAL"),
    ],
)
def test_end_step_before_start_step_is_rejected(
    hook: dict[str, Any], collection: dict[str, Any], where: str
) -> None:
    entry = {"CollectionName": "c", "CollectionParameters": collection}
    with pytest.raises(ConfigurationError, match=where):
        from_json(hook, [entry]).build_manager()
    for fine in ({"end_step": 0}, {"save_steps": [3]}, {"end_step": 11}):
        from_json({"start_step": 10, "end_step": 5, **fine}).build_manager()


def test_request_of_the_sagemaker_sdk() -> None:
    # What DebuggerHookConfig(...)._to_request_dict() returns.
    request = {
        "S3OutputPath": "s3://bucket/prefix",
        "HookParameters": {"save_interval": "100", "eval.save_interval": "10"},
        "CollectionConfigurations": [
            {"CollectionName": "gradients"},
            {"CollectionName": "losses", "CollectionParameters": {"end_step": 0}},
        ],
    }
    config = HookConfig.from_json(PYTORCH, request, environ={})
    assert config.out_dir == "s3://bucket/prefix"
    assert schedule_of(config, "gradients", EVAL) == Schedule(10)
    assert HookConfig.from_json(PYTORCH, {"S3OutputPath": None}, environ={}).out_dir


@pytest.mark.parametrize(
    ("top", "sagemaker", "out_dir"),
    [
        ({"LocalPath": "/here", "S3OutputPath": "s3://b/p"}, False, "/here"),
        ({"LocalPath": "/here", "S3OutputPath": "s3://b/p"}, True, "/here"),
        ({"S3OutputPath": "s3://b/p"}, False, "s3://b/p"),
        ({"S3OutputPath": "s3://b/p"}, True, SAGEMAKER_OUT_DIR),
        ({"S3OutputPath": None}, False, SAGEMAKER_OUT_DIR),
        ({}, True, SAGEMAKER_OUT_DIR),
    ],
)
def test_output_location_order(top: dict[str, Any], sagemaker: bool, out_dir: str) -> None:
    environ = {"TRAINING_JOB_NAME": "j"} if sagemaker else {}
    assert HookConfig.from_json(PYTORCH, top, environ=environ).out_dir == out_dir


def test_tensorboard_in_a_sagemaker_job_has_its_own_file(tmp_path: Path) -> None:
    file = tmp_path / "tb.json"
    environ = {"TRAINING_JOB_NAME": "j", "TENSORBOARD_CONFIG_FILE_PATH": str(file)}
    document = {"HookParameters": {"export_tensorboard": "true", "tensorboard_dir": "x"}}
    assert HookConfig.from_json(PYTORCH, document, environ=environ).tensorboard_dir is None
    file.write_text('{"LocalPath": "/tb"}')
    assert HookConfig.from_json(PYTORCH, document, environ=environ).tensorboard_dir == "/tb"


@pytest.mark.parametrize(
    ("hook", "collections", "message"),
    [
        ({"save_interval": 0}, None, r"x\.json, HookParameters: save_interval=0 is too small"),
        ({"train.save_interval": "0"}, None, r"train\.save_interval=0 is too small"),
        ({"save_steps": "1,x"}, None, r"HookParameters: save_steps='x' is not a whole number"),
        ({"reductions": "mean,foo"}, None, "reductions: 'foo' is not a reduction"),
        ({"include_regex": "ok,("}, None, r"HookParameters: include_regex '\(' .*position 0"),
        (None, [3], r"x\.json, CollectionConfigurations\[0\]: the entry is 3"),
        ([], None, "x.json, HookParameters.*must be a JSON object"),
        (None, {"a": 1}, "CollectionConfigurations=.*must be a JSON list"),
        (None, [{"CollectionParameters": {}}], r"\[0\]: CollectionName is missing"),
        (
            None,
            [{"CollectionName": "c", "CollectionParameters": {"include_regex": "a["}}],
            r"x\.json, collection 'c', CollectionParameters: include_regex 'a\['",
        ),
        (
            None,
            [{"CollectionName": "c", "CollectionParameters": [1]}],
            r"\[0\] \(c\): CollectionParameters is \[1\]",
        ),
    ],
)
def test_errors_name_location_and_value(hook: Any, collections: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        from_json(hook, collections)


@pytest.mark.parametrize(
    ("document", "near", "where"),
    [
        ({"HookParameters": {"save_intervall": 1}}, "save_interval", "x.json, HookParameters"),
        ({"HookParameters": {"trian.end_step": 1}}, "train.end_step", "HookParameters"),
        ({"HookParameter": {}}, "HookParameters", "x.json"),
        (
            {"CollectionConfigurations": [{"CollectionName": "c", "Parameters": {}}]},
            "CollectionParameters",
            "CollectionConfigurations[0]",
        ),
        (
            {
                "CollectionConfigurations": [
                    {"CollectionName": "c", "CollectionParameters": {"save_histo": 1}}
                ]
            },
            "save_histogram",
            "collection 'c'",
        ),
    ],
)
def test_unknown_keys_name_the_nearest(document: Any, near: str, where: str) -> None:
    with pytest.raises(UnknownKey) as caught:
        HookConfig.from_json(PYTORCH, document, source="x.json", environ={})
    assert f"did you mean {near!r}" in str(caught.value)
    assert where in str(caught.value)


def test_file_lookup_order(tmp_path: Path) -> None:
    for name in ("given", "named"):
        (tmp_path / name).write_text(json.dumps({"LocalPath": f"/{name}"}))
    environ = {CONFIG_VARIABLE: str(tmp_path / "named")}
    assert HookConfig.from_file(PYTORCH, tmp_path / "given", environ).out_dir == "/given"
    assert HookConfig.from_file(PYTORCH, None, environ).out_dir == "/named"
    with pytest.raises(ConfigurationError, match=r"debughookconfig\.json \(the default path\)"):
        HookConfig.from_file(PYTORCH, None, {})


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    # Scripts that run with and without a configuration catch the error of the file itself.
    assert issubclass(NoConfigurationFile, FileNotFoundError)
    with pytest.raises(NoConfigurationFile, match=r"c\.json \(the given path\): No such file"):
        HookConfig.from_file(PYTORCH, file, {})
    file.write_text('{"LocalPath": }')
    with pytest.raises(ConfigurationError, match=r"c\.json is not valid JSON: .*line 1"):
        HookConfig.from_file(PYTORCH, file, {})
    file.write_text("[]")
    with pytest.raises(ConfigurationError, match=r"c\.json: the whole document is \[\]"):
        HookConfig.from_file(PYTORCH, file, {})
