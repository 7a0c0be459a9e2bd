"""Layouts for readers of a snapshot: in its head as long as they are small together, then in packs.

A pack is an immutable object of about a megabyte, so a job with thousands of layouts (shapes that
change with every batch) is still opened with few requests. Layouts are taken in the order of the
mapping, and what was packed once stays packed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from smdist.format.layout import Layout
from smdist.format.stored_json import encode, read
from smdist.storage.store import Store

__all__ = ["PackedLayouts", "pack_layouts", "read_pack"]

_PACK_BYTES = 1 << 20


class _Pack(msgspec.Struct, frozen=True):
    layouts: dict[str, msgspec.Raw]


class PackedLayouts(NamedTuple):
    """`texts` are all layouts as JSON, to be given to the next call."""

    inline: dict[str, msgspec.Raw]
    keys: tuple[str, ...]
    objects: tuple[tuple[str, bytes], ...]
    texts: Mapping[str, bytes]


def pack_layouts(
    layouts: Mapping[str, Layout], texts: Mapping[str, bytes], stored: tuple[str, ...]
) -> PackedLayouts:
    """Pack `layouts`. `texts` are those packed before, `stored` keys of packs in the store."""
    texts = {
        digest: texts[digest] if digest in texts else layout.to_json()
        for digest, layout in layouts.items()
    }
    groups: list[list[str]] = [[]]
    nbytes = 0
    for digest, text in texts.items():
        groups[-1].append(digest)
        nbytes += len(text)
        if nbytes >= _PACK_BYTES:
            groups.append([])
            nbytes = 0
    keys = tuple(_key(group) for group in groups[:-1])
    objects = tuple(
        (key, encode(_Pack({digest: msgspec.Raw(texts[digest]) for digest in group}), key))
        for key, group in zip(keys, groups, strict=False)
        if key not in stored
    )
    inline = {digest: msgspec.Raw(texts[digest]) for digest in groups[-1]}
    return PackedLayouts(inline, keys, objects, texts)


async def read_pack(store: Store, key: str) -> dict[str, msgspec.Raw]:
    return (await read(store, key, _Pack)).layouts


def _key(digests: list[str]) -> str:
    name = hashlib.blake2b(",".join(digests).encode(), digest_size=12).hexdigest()
    return f"merged/layouts/{name}.json"
