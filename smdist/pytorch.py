"""Everything a PyTorch training script needs: `import smdist.pytorch as smd`."""

from __future__ import annotations

import os
from os import PathLike

from smdist.config.collection import CollectionKeys
from smdist.config.hook_config import config_file
from smdist.config.reduction_config import ReductionConfig
from smdist.config.save_config import SaveConfig
from smdist.config.save_config_mode import SaveConfigMode
from smdist.identity import modes
from smdist.trials import create_trial
from smdist.workers.torch_adapter.collection import TorchCollection as Collection
from smdist.workers.torch_adapter.hook import Hook

__all__ = [
    "Collection",
    "CollectionKeys",
    "Hook",
    "ReductionConfig",
    "SaveConfig",
    "SaveConfigMode",
    "create_trial",
    "del_hook",
    "get_hook",
    "modes",
    "set_hook",
]

_current: Hook | None = None


def get_hook(
    json_config_path: str | PathLike[str] | None = None, create_if_not_exists: bool = False
) -> Hook | None:
    """Return the hook that `set_hook` was given.

    Without one, `create_if_not_exists` builds it from the configuration file; None if there is no file.
    """
    global _current
    configured = json_config_path is not None or config_file(None, os.environ)[0].exists()
    if _current is None and create_if_not_exists and configured:
        _current = Hook.create_from_json_file(json_config_path)
    return _current


def set_hook(custom_hook: Hook) -> None:
    global _current
    _current = custom_hook


def del_hook() -> None:
    """Forget the hook without closing it."""
    global _current
    _current = None
