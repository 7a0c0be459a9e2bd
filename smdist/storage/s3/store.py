"""A bucket, or a prefix in one, as a store.

There is one long-lived client per store and event loop: one per write is forty times slower. Small
objects are sent in one request, large ones in parts (multipart.py). Bodies are streamed from the
caller's buffers (request_body.py), within limits of requests and bytes in flight (`S3Options`).
client.py explains how requests are signed, connection.py what is retried.

A conditional put carries a write id. If an answer is lost and the next attempt finds the object
there, the id tells who wrote it. Servers other than AWS are asked for the key first, since some
ignore or reject the condition. Two writers may both succeed there, which the contract allows.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from smdist.errors import ObjectExists
from smdist.storage.s3.connection import Admit, Connection, Counts
from smdist.storage.s3.errors import RequestFailed, to_store_error
from smdist.storage.s3.multipart import abort_uploads, upload
from smdist.storage.s3.options import S3Location, S3Options, parse_s3_url
from smdist.storage.s3.request_body import flat_views
from smdist.storage.s3.write_probe import probe
from smdist.storage.store import Buffer, check_key, check_range, check_size

__all__ = ["S3Options", "S3Statistics", "S3Store", "open_s3"]

T = TypeVar("T")

_WRITE_ID = "smdist-write"


@dataclass(frozen=True)
class S3Statistics:
    requests: Mapping[str, int]  # attempts, by S3 operation
    retries: Mapping[str, int]  # by error code
    sent_bytes: int
    received_bytes: int
    in_flight_bytes: int
    most_in_flight_bytes: int
    renewals: int  # new clients, for newer credentials


def open_s3(url: str, options: S3Options | None = None) -> S3Store:
    return S3Store(parse_s3_url(url), options)


class S3Store:
    def __init__(self, location: S3Location, options: S3Options | None = None) -> None:
        self._location, self._options = location, options or S3Options()
        self._counts = Counts()
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        return self._location.url

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def statistics(self) -> S3Statistics:
        counts = self._counts
        return S3Statistics(
            dict(counts.requests),
            dict(counts.retries),
            counts.sent_bytes,
            counts.received_bytes,
            counts.in_flight_bytes,
            counts.most_in_flight_bytes,
            counts.renewals,
        )

    @property
    def parts_stored(self) -> int:
        """Return the number of stored parts of multipart uploads: shows that a long put progresses."""
        return self._counts.parts

    @property
    def dangling_uploads(self) -> bool:
        """Return whether uploads of this store may remain that could not be aborted."""
        return bool(self._counts.dangling)

    async def check(self) -> None:
        timeout_s = self._options.probe_timeout_s
        await asyncio.to_thread(probe, self._location, timeout_s=timeout_s)

    @property
    def ignores_conditions(self) -> bool:
        """Return whether two conditional puts of a key may both succeed. Only AWS is known to be safe."""
        connection = self._connection
        return connection is None or not (connection.is_aws and connection.conditions)

    async def put(self, key: str, data: Sequence[Buffer], *, if_absent: bool = False) -> None:
        name = self._name(key)
        views = flat_views(data)
        work = self._put_if_absent(key, name, views) if if_absent else self._put(name, views)
        await self._named(key, "put", work)

    async def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        name = self._name(key)
        check_range(start, stop)
        admit = partial(check_size, self.url, key)
        return await self._named(key, "get", self._get(name, start, stop, admit))

    async def list(self, prefix: str = "", *, after: str = "") -> Sequence[str]:
        return await self._named(prefix, "list", self._list(prefix, after))

    async def delete(self, key: str) -> None:
        await self._named(key, "delete", self._delete(self._name(key)))

    async def folders(self, prefix: str = "") -> Sequence[str]:
        """Return the names directly under `prefix` that have keys below them."""
        return await self._named(prefix, "list", self._folders(prefix))

    async def sweep_uploads(self, prefix: str) -> int:
        """Abort unfinished multipart uploads of keys that begin with `prefix`; return their number.

        Called by the one writer of these keys before its first put. A killed predecessor may have
        left some, which cost money and appear in no listing.
        """
        return await self._named(prefix, "sweep", self._sweep(prefix))

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and self._loop is asyncio.get_running_loop():
            await connection.close()

    # -- operations ------------------------------------------------------------------------------

    async def _put(
        self,
        name: str,
        views: Sequence[memoryview],
        metadata: dict[str, str] | None = None,
        condition: dict[str, str] | None = None,
    ) -> None:
        condition = condition or {}
        if sum(view.nbytes for view in views) < self._options.multipart_bytes:
            params = {"Key": name, **({"Metadata": metadata} if metadata else {}), **condition}
            await self._call("put_object", params, body=views)
            return
        metadata = metadata or {_WRITE_ID: uuid.uuid4().hex}
        connection = await self._connect()
        try:
            await upload(connection, name, views, metadata=metadata, condition=condition)
        except RequestFailed as failed:
            # An attempt whose answer was lost has completed it: the next one finds no upload.
            lost = failed.unsure and failed.fault.kind in ("no_upload", "missing")
            if not lost or not await self._is_own_write(name, metadata[_WRITE_ID], views):
                raise

    async def _put_if_absent(self, key: str, name: str, views: Sequence[memoryview]) -> None:
        connection = await self._connect()
        write_id = uuid.uuid4().hex
        sure = connection.is_aws and connection.conditions
        if not sure and await self._head(name) is not None:
            raise ObjectExists(self.url, key, "put")
        condition = {"IfNoneMatch": "*"} if connection.conditions else {}
        try:
            await self._put(name, views, {_WRITE_ID: write_id}, condition)
        except RequestFailed as failed:
            if failed.fault.kind in ("unsupported", "foreign") and condition:
                connection.conditions = False
                await self._put_if_absent(key, name, views)
                return
            if failed.fault.kind != "exists":
                raise
            if not (failed.unsure and await self._is_own_write(name, write_id, views)):
                raise ObjectExists(self.url, key, "put") from None

    async def _is_own_write(self, name: str, write_id: str, views: Sequence[memoryview]) -> bool:
        metadata = await self._head(name)
        if metadata is None:
            return False
        found = metadata.get(_WRITE_ID)
        if found is not None:
            return found == write_id
        # Some servers drop the metadata with the id: compare the content then.
        return await self._get(name, 0, None) == b"".join(views)

    async def _head(self, name: str) -> dict[str, str] | None:
        """Return the metadata of an object, None without one.

        Not by a HEAD, which cannot tell a missing object from a missing bucket.
        """
        try:
            answer = await self._call("get_object", {"Key": name, "Range": "bytes=0-0"})
        except RequestFailed as failed:
            if failed.fault.kind == "missing":
                return None
            if failed.fault.kind == "range":  # it is empty
                head = await self._call("head_object", {"Key": name})
                return _lowercase_names(head["Metadata"])
            raise
        return _lowercase_names(answer["Metadata"])

    async def _get(
        self, name: str, start: int, stop: int | None, admit: Admit | None = None
    ) -> bytes:
        empty = stop is not None and stop <= start
        params = {"Key": name}
        if empty:  # only check that it exists
            params["Range"] = "bytes=0-0"
        elif start or stop is not None:
            params["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
        try:
            expected = 0 if stop is None else max(stop - start, 0)
            answer = await self._call("get_object", params, answer_bytes=expected, admit=admit)
        except RequestFailed as failed:
            if failed.fault.kind == "range":
                return b""
            raise
        data: bytes = answer["Body"]
        if empty:
            return b""
        # Trust the header: one server answers a range with status 200, another ignores it.
        return data if "ContentRange" in answer or "Range" not in params else data[start:stop]

    async def _list(self, prefix: str, after: str) -> Sequence[str]:
        base = self._location.name("")
        params = {"Prefix": base + prefix}
        if after and base + after >= params["Prefix"]:
            params["StartAfter"] = base + after
        found: list[str] = []
        while True:
            page = await self._call("list_objects_v2", params)
            names = (str(entry["Key"])[len(base) :] for entry in page.get("Contents", ()))
            found += [key for key in names if key > after and not _is_hidden(key)]
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return sorted(found)
            params["ContinuationToken"] = token

    async def _folders(self, prefix: str) -> Sequence[str]:
        base = self._location.name(prefix)
        params = {"Prefix": base, "Delimiter": "/"}
        found: set[str] = set()
        while True:
            page = await self._call("list_objects_v2", params)
            names = (str(entry["Prefix"]) for entry in page.get("CommonPrefixes", ()))
            found.update(name[len(base) :].strip("/") for name in names)
            token = page.get("NextContinuationToken")
            if not page.get("IsTruncated") or not token:
                return sorted(name for name in found if name and not name.startswith("."))
            params["ContinuationToken"] = token

    async def _delete(self, name: str) -> None:
        try:
            await self._call("delete_object", {"Key": name})
        except RequestFailed as failed:
            if failed.fault.kind != "missing":
                raise

    async def _sweep(self, prefix: str) -> int:
        name = self._location.name(prefix)
        count = await abort_uploads(await self._connect(), name)
        dangling = self._counts.dangling
        dangling.difference_update([key for key in dangling if key.startswith(name)])
        return count

    # -- requests --------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return self._location.name(check_key(self.url, key))

    async def _call(
        self,
        method: str,
        params: dict[str, Any],
        body: Sequence[memoryview] = (),
        answer_bytes: int = 0,
        admit: Admit | None = None,
    ) -> dict[str, Any]:
        connection, place = await self._connect(), {"Bucket": self._location.bucket}
        return await connection.call(
            method, {**place, **params}, body=body, answer_bytes=answer_bytes, admit=admit
        )

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._connection is None or self._loop is not loop:
            # Leave the connection of another loop (maybe from before a fork) alone.
            self._connection = Connection(self._location, self._options, self._counts)
            self._loop = loop
        await self._connection.open()
        return self._connection

    async def _named(self, key: str, operation: str, work: Awaitable[T]) -> T:
        try:
            return await work
        except RequestFailed as failed:
            endpoint = self._connection.endpoint if self._connection is not None else ""
            raise to_store_error(self._location, endpoint, key, operation, failed) from failed.error


def _is_hidden(key: str) -> bool:
    """Check for keys that no put makes: hidden names, and the empty "folders" of consoles."""
    return not key or key.startswith(".") or "/." in key or key.endswith("/") or "//" in key


def _lowercase_names(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in metadata.items()}
