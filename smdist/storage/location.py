"""From a URL or path to its store."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from smdist.errors import ConfigurationError, StoreError
from smdist.storage import sync
from smdist.storage.local import LocalStore

if TYPE_CHECKING:
    from smdist.storage.base import Store

__all__ = ["check_writable", "is_remote", "open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(r"s3:/[^/]", re.IGNORECASE)


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether every object there is a request, and the place the same from everywhere."""
    return os.fspath(url)[:5].lower() == "s3://"


def open_store(url: str | os.PathLike[str], *, deadline_s: float | None = None) -> Store:
    """The store at a path, `~/path`, `file://` or `s3://` URL; touches nothing yet.

    After `deadline_s` an operation over a network raises what fails; without it, after a minute.
    """
    text = os.fspath(url)
    if not text or "\0" in text:
        raise ConfigurationError(f"{text!r} is no place to store a run: give a path or s3://...")
    found = _SCHEME.match(text)
    if found is None:
        if _COLLAPSED.match(text):
            raise ConfigurationError(
                f"{text!r} has lost a slash, as pathlib takes it away: give an s3:// URL as text"
            )
        return LocalStore(text)
    scheme = found[1].lower()
    if scheme == "file":
        return LocalStore(_file_path(text))
    if scheme == "s3":
        return _open_s3(text, deadline_s)
    raise ConfigurationError(
        f"smdist cannot store in {text!r}: use a path, file:// or s3://, not {scheme}://"
    )


def check_writable(url: str | os.PathLike[str], timeout_s: float = 10.0) -> None:
    """Raise now what the first put would raise: StoreForbidden, StoreFull, StoreError."""
    store = open_store(url)

    async def probe() -> None:
        try:
            await asyncio.wait_for(store.check(), timeout_s)
        except asyncio.TimeoutError:
            detail = f"no answer within {timeout_s:g} s; is the file system or network up?"
            raise StoreError(store.url, "", "write", detail) from None
        finally:
            await store.close()

    sync.run(probe())


def _file_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigurationError(f"{url!r} names another machine: write file:///absolute/path")
    # What looks like a query or fragment is part of the path in a file URL that somebody typed.
    return unquote(url[url.index("://") + 3 + len(parts.netloc) :])


def _open_s3(url: str, deadline_s: float | None) -> Store:
    try:
        module = importlib.import_module("smdist.storage.s3")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _S3_MODULES:
            raise
        raise ConfigurationError(
            f"{url!r} needs S3 support, which is not installed: pip install 'smdist[s3]'"
        ) from error
    options = None if deadline_s is None else module.S3Options(deadline_s=deadline_s)
    store: Store = module.open_s3(url, options)
    return store


_S3_MODULES = {"smdist", "aiobotocore", "aiohttp", "boto3", "botocore"}
