"""Collections, likewise; those of a framework are in its facade."""

from __future__ import annotations

from smdist.config.collection import Collection, CollectionKeys

__all__ = ["Collection", "CollectionKeys"]
