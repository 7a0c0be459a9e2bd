"""`HookConfig`: the checked configuration of a hook, from Python arguments or from JSON.

    {"S3OutputPath": ..., "LocalPath": ..., "HookParameters": {...} | null,
     "CollectionConfigurations": [{"CollectionName": ..., "CollectionParameters": {...} | null}] | null}

Values may be text or native; lists may be JSON lists, JSON lists as text, or separated by commas.
A setting of a collection is looked up in this order: the collection's key for the mode, its key, the
hook's key for the mode, the hook's key, the framework's default.

The output location is `LocalPath` if given; else, in a SageMaker job, the directory that the platform
copies to `S3OutputPath`; else `S3OutputPath`; else that directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smdist.config.collection import Collection, CollectionKeys
from smdist.config.collection_manager import CollectionManager
from smdist.config.framework import Framework
from smdist.config.parameters import PARAMETERS, Scope, Section, read_arguments, read_section
from smdist.config.readers import check_keys, error_context
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.errors import ConfigurationError, NoConfigurationFile
from smdist.identity import ModeKeys

__all__ = [
    "CONFIG_VARIABLE",
    "DEFAULT_CONFIG_FILE",
    "CollectionConfig",
    "HookConfig",
    "config_file",
]

CONFIG_VARIABLE = "SMDEBUG_CONFIG_FILE_PATH"
DEFAULT_CONFIG_FILE = "/opt/ml/input/config/debughookconfig.json"
TENSORBOARD_VARIABLE = "TENSORBOARD_CONFIG_FILE_PATH"
DEFAULT_TENSORBOARD_FILE = "/opt/ml/input/config/tensorboardoutputconfig.json"
SAGEMAKER_OUT_DIR = "/opt/ml/output/tensors"
SAGEMAKER_JOB_VARIABLE = "TRAINING_JOB_NAME"

_TOP = ("S3OutputPath", "S3Path", "LocalPath", "HookParameters", "CollectionConfigurations")


@dataclass(frozen=True)
class CollectionConfig:
    """The settings of one collection in JSON. They apply before those that the script makes."""

    name: str
    section: Section

    def apply(self, collection: Collection, hook: HookConfig) -> None:
        collection.save_config = self.section.save_config(hook.save_config)
        collection.reduction_config = self.section.reduction_config(hook.reduction_config)
        rest = self.section.rest
        collection.include(rest.get("include_regex", ()))
        for name in rest.get("tensor_names", ()):
            collection.add_tensor_name(name)
        if "save_histogram" in rest:
            collection.save_histogram = rest["save_histogram"]


@dataclass(frozen=True)
class HookConfig:
    """The checked configuration of a hook. `tensorboard_dir` is set if and only if it exports there."""

    framework: Framework
    out_dir: str
    tensorboard_dir: str | None = None
    dry_run: bool = False
    reduction_config: ReductionConfig = field(default_factory=ReductionConfig)
    save_config: SaveConfig = field(default_factory=SaveConfig)
    include_regex: tuple[str, ...] = ()
    include_collections: tuple[str, ...] = ()
    save_all: bool = False
    include_workers: str | tuple[int, ...] = "one"
    collections: tuple[CollectionConfig, ...] = ()
    buffer_bytes: int | None = None
    segment_bytes: int | None = None
    linger_s: float | None = None
    drain_deadline_s: float | None = None
    on_full: str = "block"
    on_error: str = "warn"
    overhead_budget: float | None = None
    resume: bool = False
    stage_gradients: str = "local"

    @classmethod
    def from_arguments(cls, framework: Framework, **arguments: Any) -> HookConfig:
        """Read the arguments of a hook's constructor; None means the default."""
        with error_context(f"{framework.name} hook"):
            given = read_arguments(arguments)
            if "out_dir" not in given:
                raise ConfigurationError(
                    "out_dir is missing; give a directory without a run, or s3://bucket/prefix"
                )
            return cls._completed(framework, given)

    @classmethod
    def from_json(
        cls,
        framework: Framework,
        document: Mapping[str, Any],
        source: str = "hook configuration",
        environ: Mapping[str, str] | None = None,
    ) -> HookConfig:
        """Read a parsed configuration; `source` is its name in error messages."""
        environ = os.environ if environ is None else environ
        _check_mapping(document, source, "the whole document")
        check_keys(document, _TOP, source)
        where = f"{source}, HookParameters"
        with error_context(where):
            parameters = document.get("HookParameters")
            parameters = {} if parameters is None else parameters
            _check_mapping(parameters, "HookParameters", "it")
            section = read_section(parameters, Scope.HOOK, where)
        given = dict(section.rest)
        with error_context(source):
            given["out_dir"] = _out_dir(document, environ)
        if SAGEMAKER_JOB_VARIABLE in environ:
            given["tensorboard_dir"] = _sagemaker_tensorboard(environ)
            given["export_tensorboard"] = False  # only that directory counts
        default = SaveConfig(save_interval=framework.save_interval)
        given["save_config"] = section.save_config(fallback=default)
        given["reduction_config"] = section.reduction_config()
        given["collections"] = _collections(document.get("CollectionConfigurations"), source)
        named = [collection.name for collection in given["collections"]]
        given["include_collections"] = (*given.get("include_collections", ()), *named)
        return cls._completed(framework, given)

    @classmethod
    def from_file(
        cls,
        framework: Framework,
        path: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> HookConfig:
        """Read `path`, else the file in `SMDEBUG_CONFIG_FILE_PATH`, else the platform's file."""
        file, why = config_file(path, os.environ if environ is None else environ)
        document = _load(file, why)
        return cls.from_json(framework, document, source=str(file), environ=environ)

    @classmethod
    def _completed(cls, framework: Framework, given: dict[str, Any]) -> HookConfig:
        save_config = given.get("save_config", SaveConfig())
        given["save_config"] = save_config.with_default_interval(framework.save_interval)
        given["include_collections"] = tuple(dict.fromkeys(given.get("include_collections", ())))
        # A directory without the flag: the flag was forgotten.
        if given.pop("export_tensorboard", False) and given.get("tensorboard_dir") is None:
            given["tensorboard_dir"] = given["out_dir"].rstrip("/") + "/tensorboard"
        return cls(framework=framework, **given)

    @property
    def export_tensorboard(self) -> bool:
        return self.tensorboard_dir is not None

    @property
    def active_collections(self) -> tuple[str, ...]:
        """Return the names of the collections to save.

        These are the framework's own, the requested ones, and `default` and `all` if `include_regex`
        and `save_all` are set.
        """
        names = [*self.framework.always, *self.include_collections]
        if self.include_regex:
            names.append(CollectionKeys.DEFAULT)
        if self.save_all:
            names.append(CollectionKeys.ALL)
        return tuple(dict.fromkeys(names))

    def build_manager(self, collection_type: type[Collection] = Collection) -> CollectionManager:
        """Create the collections of a hook with this configuration."""
        manager = CollectionManager(
            self.framework, self.save_config, self.reduction_config, collection_type
        )
        if self.include_regex:
            manager.get(CollectionKeys.DEFAULT).include(self.include_regex)
        for collection in self.collections:
            collection.apply(manager.get(collection.name), self)
        with error_context(f"{self.framework.name} hook"):
            _check_steps(self.save_config)
        for name, made in manager.get_collections().items():
            with error_context(f"collection {name!r}"):
                _check_steps(made.save_config)
        return manager


def _check_steps(config: SaveConfig | None) -> None:
    if config is None:
        return
    for mode in ModeKeys:
        schedule = config.schedule(mode)
        # None is no end; 0 switches the interval off.
        ends = schedule.end_step and schedule.start_step >= schedule.end_step
        if ends and not schedule.save_steps:
            raise ConfigurationError(
                f"start_step={schedule.start_step} is not before end_step={schedule.end_step} in "
                f"mode {mode.name}: nothing would be saved; correct one of them, or set "
                "end_step=0 to save nothing"
            )


def config_file(
    path: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> tuple[Path, str]:
    """Return the file to read and, for messages, what selected it."""
    if path is not None:
        return Path(path).expanduser(), "the given path"
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE]).expanduser(), CONFIG_VARIABLE
    return Path(DEFAULT_CONFIG_FILE), "the default path"


def _load(file: Path, why: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        raise (NoConfigurationFile if absent else ConfigurationError)(
            f"cannot read the hook configuration {file} ({why}): {error.strerror}; pass its path, "
            f"or set {CONFIG_VARIABLE}"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{file} is not valid JSON: {error}; correct the file") from error


def _check_mapping(value: object, where: str, what: str) -> None:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{where}: {what} is {value!r}; it must be a JSON object")


def _out_dir(document: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    remote = document.get("S3OutputPath") or document.get("S3Path")
    if SAGEMAKER_JOB_VARIABLE in environ:
        remote = None
    key, value = "LocalPath", document.get("LocalPath")
    if not value:
        key, value = ("S3OutputPath", remote) if remote else (key, SAGEMAKER_OUT_DIR)
    return str(PARAMETERS["out_dir"].read(key, value))


def _sagemaker_tensorboard(environ: Mapping[str, str]) -> str | None:
    """Return the TensorBoard directory of a SageMaker job, which has a file of its own for it."""
    file = Path(environ.get(TENSORBOARD_VARIABLE) or DEFAULT_TENSORBOARD_FILE)
    if not file.is_file():
        return None
    document = _load(file, TENSORBOARD_VARIABLE)
    _check_mapping(document, str(file), "the whole document")
    found = document.get("LocalPath")
    return None if not found else str(PARAMETERS["tensorboard_dir"].read("LocalPath", found))


def _collections(given: Any, source: str) -> tuple[CollectionConfig, ...]:
    if given is None:
        return ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigurationError(
            f"{source}: CollectionConfigurations={given!r} must be a JSON list"
        )
    merged: dict[str, dict[str, Any]] = {}
    for index, entry in enumerate(given):
        where = f"{source}, CollectionConfigurations[{index}]"
        _check_mapping(entry, where, "the entry")
        check_keys(entry, ("CollectionName", "CollectionParameters"), where)
        name = entry.get("CollectionName")
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{where}: CollectionName is missing; every entry needs one")
        parameters = entry.get("CollectionParameters")
        parameters = {} if parameters is None else parameters
        _check_mapping(parameters, f"{where} ({name})", "CollectionParameters")
        merged.setdefault(name, {}).update(parameters)
    result = []
    for name, parameters in merged.items():
        where = f"{source}, collection {name!r}, CollectionParameters"
        with error_context(where):
            section = read_section(parameters, Scope.COLLECTION, where)
        result.append(CollectionConfig(name, section))
    return tuple(result)
