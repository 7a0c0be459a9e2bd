"""The names that a TensorFlow training script needs: `import smdist.tensorflow as smd`."""

from __future__ import annotations

import os
from os import PathLike
from typing import Any

from smdist.config.collection import CollectionKeys
from smdist.config.hook_config import config_file
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.config.save_config_mode import SaveConfigMode
from smdist.identity import modes
from smdist.trials import Trial
from smdist.trials import create_trial as open_trial
from smdist.workers.hook import lifecycle
from smdist.workers.keras_adapter.hook import KerasHook
from smdist.workers.tf_adapter.base_hook import TensorflowHook
from smdist.workers.tf_adapter.collection import TensorFlowCollection as Collection
from smdist.workers.tf_adapter.session_hook import EstimatorHook, SessionHook

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
_FLUSH_S = 60.0
_current: TensorflowHook | None = None


def create_trial(
    path: str | PathLike[str] | None = None,
    name: str | None = None,
    range_steps: Any = None,
    **options: Any,
) -> Trial:
    """Open a run, as `smdist.create_trial` does, after flushing hooks of this process that save there.

    So a script finds its own run without closing its hook.
    """
    place = options.get("out_dir") if path is None else path
    for hook in lifecycle.open_hooks():
        if place is not None and _is_same_place(hook.out_dir, place):
            hook.flush(_FLUSH_S)
    return open_trial(path, name, range_steps, **options)


def _is_same_place(one: str, other: str | PathLike[str]) -> bool:
    texts = [os.fspath(one), os.fspath(other)]
    if any("://" in text for text in texts):
        return texts[0].rstrip("/") == texts[1].rstrip("/")
    return len({os.path.realpath(os.path.expanduser(text)) for text in texts}) == 1


def get_hook(
    hook_type: str | None = None,
    json_config_path: str | PathLike[str] | None = None,
    create_if_not_exists: bool = False,
) -> TensorflowHook | None:
    """Return the hook given to `set_hook`, or None.

    `create_if_not_exists`: make one from the configuration file, if there is one. `hook_type` is
    "keras" (the default), "session" or "estimator".
    """
    global _current
    has_config = json_config_path is not None or config_file(None, os.environ)[0].exists()
    if _current is None and create_if_not_exists and has_config:
        _current = _KINDS[hook_type or "keras"].create_from_json_file(json_config_path)
    return _current


def set_hook(custom_hook: TensorflowHook) -> None:
    global _current
    _current = custom_hook


def del_hook() -> None:
    """Forget the hook of `set_hook` without closing it."""
    global _current
    _current = None
