"""`import smdist.tensorflow as smd`: all that a TensorFlow training script needs."""

from __future__ import annotations

from os import PathLike

from smdist.collection import CollectionKeys
from smdist.config.hook import config_file
from smdist.identity import modes
from smdist.reduction import ReductionConfig
from smdist.schedule import SaveConfig, SaveConfigMode
from smdist.trials import create_trial
from smdist.workers.keras_hook import KerasHook
from smdist.workers.session_hook import EstimatorHook, SessionHook
from smdist.workers.tf_base import TensorflowHook
from smdist.workers.tf_collection import Collection

__all__ = [
    "Collection",
    "CollectionKeys",
    "EstimatorHook",
    "KerasHook",
    "ReductionConfig",
    "SaveConfig",
    "SaveConfigMode",
    "SessionHook",
    "create_trial",
    "del_hook",
    "get_hook",
    "modes",
    "set_hook",
]

_KINDS: dict[str, type[TensorflowHook]] = {
    "keras": KerasHook,
    "session": SessionHook,
    "estimator": EstimatorHook,
}
_current: TensorflowHook | None = None


def get_hook(
    hook_type: str | None = None,
    json_config_path: str | PathLike[str] | None = None,
    create_if_not_exists: bool = False,
) -> TensorflowHook | None:
    """The hook that `set_hook` was given, or (`create_if_not_exists`) one from the configuration
    file, of the kind "keras" (the default), "session" or "estimator"; None where there is neither.
    """
    global _current
    if _current is None and create_if_not_exists:
        import os

        if json_config_path is not None or config_file(None, os.environ)[0].exists():
            _current = _KINDS[hook_type or "keras"].create_from_json_file(json_config_path)
    return _current


def set_hook(hook: TensorflowHook) -> None:
    global _current
    _current = hook


def del_hook() -> None:
    """Forget the hook; it is not closed by that."""
    global _current
    _current = None
