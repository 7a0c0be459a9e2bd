"""Stores: where runs are kept. `base` has the contract; import from the modules that hold things."""

from __future__ import annotations

from smdist.storage.in_memory import MemoryStore
from smdist.storage.local import LocalStore
from smdist.storage.store import Buffer, Store
from smdist.storage.urls import check_writable, is_remote, open_store, pin_url

__all__ = [
    "Buffer",
    "LocalStore",
    "MemoryStore",
    "Store",
    "check_writable",
    "is_remote",
    "open_store",
    "pin_url",
]
