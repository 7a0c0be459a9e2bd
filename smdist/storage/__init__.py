"""Stores: where runs are kept.

store            the contract that every store fulfils
urls             opens the store at a path or URL
local            a directory; rooted_files, direct_io are its parts
s3               S3 and compatible servers
in_memory        for tests
subtree          a folder of a store as a store
loop_thread      runs coroutines for callers that are not asynchronous
"""

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
