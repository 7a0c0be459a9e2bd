"""Collections under the path that smdebug scripts import; a framework's own are in its facade."""

from __future__ import annotations

from smdist.config.collection import Collection, CollectionKeys

__all__ = ["Collection", "CollectionKeys"]
