"""Tensors of every rank of a distributed training job, at one consistent step.

The public names are loaded on first use (PEP 562): importing smdist must cost a training script
nothing, and no framework or SDK is needed until a name asks for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smdist.config.collection import Collection, CollectionKeys
    from smdist.config.reduction_config import ReductionConfig
    from smdist.config.save_config import SaveConfig
    from smdist.config.save_config_mode import SaveConfigMode
    from smdist.identity import modes
    from smdist.trials import create_trial

__all__ = [
    "Collection",
    "CollectionKeys",
    "ReductionConfig",
    "SaveConfig",
    "SaveConfigMode",
    "__version__",
    "create_trial",
    "modes",
]

__version__ = "0.1.0"

_HOME = {
    "Collection": "smdist.config.collection",
    "CollectionKeys": "smdist.config.collection",
    "ReductionConfig": "smdist.config.reduction_config",
    "SaveConfig": "smdist.config.save_config",
    "SaveConfigMode": "smdist.config.save_config_mode",
    "create_trial": "smdist.trials",
    "modes": "smdist.identity",
}


if not TYPE_CHECKING:  # else a type checker would let any misspelt name pass

    def __getattr__(name: str) -> object:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
