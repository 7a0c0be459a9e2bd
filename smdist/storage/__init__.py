"""Stores: where runs are kept. `base` has the contract; import from the modules that hold things."""

from __future__ import annotations

from smdist.storage.base import Buffer, Store
from smdist.storage.local import LocalStore
from smdist.storage.location import check_writable, is_remote, open_store, pinned
from smdist.storage.memory import MemoryStore

__all__ = [
    "Buffer",
    "LocalStore",
    "MemoryStore",
    "Store",
    "check_writable",
    "is_remote",
    "open_store",
    "pinned",
]
