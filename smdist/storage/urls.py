"""Open the store at a URL or path."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from smdist.errors import ConfigurationError, StoreError
from smdist.messages import redact_url
from smdist.storage import loop_thread as sync
from smdist.storage.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from smdist.storage.store import Store

__all__ = ["check_writable", "is_remote", "open_store", "pin_url"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"s3:/[^/]", re.IGNORECASE)


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Check whether the store is reached over a network, the same from every machine."""
    return os.fspath(url)[:5].lower() == "s3://"


def open_store(
    url: str | os.PathLike[str],
    *,
    deadline_s: float | None = None,
    concurrency: int | None = None,
) -> Store:
    """Return the store at a path, `~/path`, `file://` or `s3://` URL. Does no I/O yet.

    `deadline_s` limits the retries of one operation over a network (default: a minute).
    `concurrency` limits the requests over a network that run at once.
    """
    text = os.fspath(url)
    if not text or "\0" in text:
        raise ConfigurationError(
            f"{redact_url(text)!r} is not a place to store a run: use a path or s3://..."
        )
    found = _SCHEME.match(text)
    if found is None:
        if _COLLAPSED.match(text):
            raise ConfigurationError(
                f"{redact_url(text)!r} has lost a slash: pathlib removes it. Pass an s3:// URL as str."
            )
        return LocalStore(text)
    scheme = found[1].lower()
    if scheme == "file":
        return LocalStore(_file_path(text))
    if scheme == "s3":
        return _open_s3(text, {"deadline_s": deadline_s, "concurrency": concurrency})
    raise ConfigurationError(
        f"cannot store in {redact_url(text)!r}: use a path, file:// or s3://, not {scheme}://"
    )


def pin_url(url: str) -> str:
    """Return `url` in a form that means the same store in every process of this machine."""
    if not is_remote(url):
        # Other processes may have another working directory.
        return url if "://" in url else str(Path(url).absolute())
    pin: Callable[[str], str] = importlib.import_module("smdist.storage.s3.pinned_url").pin
    return pin(url)


def check_writable(url: str | os.PathLike[str], timeout_s: float | None = None) -> None:
    """Raise now what the first put would raise: StoreForbidden, StoreFull, StoreError."""
    store = open_store(url)
    if timeout_s is None:
        # The S3 store has limits of its own; this one covers the rest, such as a resolver that
        # hangs. Ranks that start together on few processors need time to load the SDK.
        timeout_s = 40.0 if is_remote(url) else 10.0

    async def probe() -> None:
        try:
            await asyncio.wait_for(store.check(), timeout_s)
        except asyncio.TimeoutError:
            detail = (
                f"no answer within {timeout_s:g} s; check that the file system or network is up"
            )
            raise StoreError(store.url, "", "write", detail) from None
        finally:
            await store.close()

    sync.run(probe())


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigurationError(
            f"{redact_url(url)!r} names another machine: write file:///absolute/path"
        )
    # In a typed file URL, what looks like a query or fragment is part of the path.
    return unquote(url[url.index("://") + 3 + len(parts.netloc) :])


def _open_s3(url: str, options: dict[str, float | int | None]) -> Store:
    try:
        module = importlib.import_module("smdist.storage.s3.store")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _S3_MODULES:
            raise
        raise ConfigurationError(
            f"{redact_url(url)!r} needs S3 support, which is not installed: pip install 'smdist[s3]'"
        ) from error
    given = {name: value for name, value in options.items() if value is not None}
    store: Store = module.open_s3(url, module.S3Options(**given))
    return store


_S3_MODULES = {"smdist", "aiobotocore", "aiohttp", "boto3", "botocore"}
