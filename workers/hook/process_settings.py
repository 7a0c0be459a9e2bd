"""The settings of a hook that only the process knows: its rank, its attempt, where it buffers."""

from __future__ import annotations

import os

import msgspec

from smdist.config.readers import absolute_path, read_integer
from smdist.errors import ConfigurationError

__all__ = ["ProcessSettings"]


class ProcessSettings(msgspec.Struct, frozen=True):
    rank: int | None = None
    world_size: int | None = None
    attempt: int | None = None
    spool_dir: str | None = None

    @classmethod
    def read(
        cls,
        rank: object = None,
        world_size: object = None,
        attempt: object = None,
        spool_dir: object = None,
    ) -> ProcessSettings:
        """Check the arguments of a hook's constructor; None means not given."""
        return cls(
            None if rank is None else read_integer("rank", rank),
            None if world_size is None else read_integer("world_size", world_size, minimum=1),
            None if attempt is None else read_integer("attempt", attempt),
            None if spool_dir is None else _folder("spool_dir", spool_dir),
        )


def _folder(key: str, value: object) -> str:
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            raise TypeError("not a path")
        return absolute_path(text)
    except (TypeError, OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"{key}={value!r} cannot hold the buffer ({error}); use a directory that this process can "
            "write to"
        ) from error
