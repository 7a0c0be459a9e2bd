"""The configuration of a hook, from Python arguments or from JSON."""

from __future__ import annotations

from smdist.config.collection_manager import CollectionManager
from smdist.config.framework import PYTORCH, TENSORFLOW, TENSORFLOW_GRAPH, Framework
from smdist.config.hook_config import CollectionConfig, HookConfig

__all__ = [
    "PYTORCH",
    "TENSORFLOW",
    "TENSORFLOW_GRAPH",
    "CollectionConfig",
    "CollectionManager",
    "Framework",
    "HookConfig",
]
