"""Upload large objects in parts, and leave no unfinished upload behind.

An upload that fails or is cancelled is aborted before the call ends. If the answer to its creation was
lost, it is found by listing: a key has one writer. If that fails too, the key is remembered as
dangling, for its next upload and for `abort_uploads`. The next writer of the same keys calls
`abort_uploads` for what a killed process has left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from smdist.concurrency import await_despite_cancellation, bounded_gather
from smdist.storage.s3.connection import Connection
from smdist.storage.s3.errors import RequestFailed
from smdist.storage.s3.request_body import split_views

__all__ = ["abort_uploads", "part_size", "upload"]

_MAX_PARTS = 10_000
# Answers to a listing of uploads that mean none: of rclone, and of servers without such a listing.
_NONE = ("no_upload", "missing", "unsupported", "foreign")
_ABORT_DEADLINE_S = 20.0


def part_size(total: int, wanted: int) -> int:
    """Return `wanted`, or more (in whole MiB) if the number of parts would exceed the limit."""
    least = -(-total // _MAX_PARTS)
    return wanted if least <= wanted else -(-least // (1 << 20)) << 20


async def upload(
    connection: Connection,
    name: str,
    views: Sequence[memoryview],
    *,
    metadata: dict[str, str],
    condition: dict[str, str],
) -> None:
    """Upload an object in parts. Raise RequestFailed; only completion may be of unsure effect."""
    place = {"Bucket": connection.location.bucket, "Key": name}
    total = sum(view.nbytes for view in views)
    parts = split_views(views, part_size(total, connection.options.part_bytes))
    known = _Created()
    try:
        await _create(connection, {**place, "Metadata": metadata}, known)
        this = {**place, "UploadId": known.upload_id}
        tags = await _send_parts(connection, this, parts)
        numbered = [{"ETag": tag, "PartNumber": i} for i, tag in enumerate(tags, 1)]
        call = {**this, "MultipartUpload": {"Parts": numbered}, **condition}
        await connection.call("complete_multipart_upload", call)
    except BaseException:
        await await_despite_cancellation(_clean_up(connection, name, known))
        raise
    if known.unsure or name in connection.counts.dangling:
        await await_despite_cancellation(_clean_up(connection, name, _Created(unsure=True)))


class _Created:
    def __init__(self, *, unsure: bool = False) -> None:
        self.upload_id: str | None = None
        self.unsure = unsure  # there may be an upload whose id is unknown


async def _create(connection: Connection, params: dict[str, Any], known: _Created) -> None:
    known.unsure = True
    answer = await connection.call("create_multipart_upload", params)
    known.upload_id = str(answer["UploadId"])
    known.unsure = answer["ResponseMetadata"]["RetryAttempts"] > 0


async def _send_parts(
    connection: Connection, place: dict[str, Any], parts: Sequence[Sequence[memoryview]]
) -> list[str]:
    async def send(number: int) -> str:
        params = {**place, "PartNumber": number + 1}
        answer = await connection.call("upload_part", params, body=parts[number])
        connection.counts.parts += 1
        return str(answer["ETag"])

    return await bounded_gather(send, range(len(parts)), connection.options.concurrency)


async def abort_uploads(connection: Connection, prefix: str, *, exact: bool = False) -> int:
    """Abort the unfinished uploads of keys that begin with `prefix` and return their number."""
    place: dict[str, Any] = {"Bucket": connection.location.bucket}
    params = {**place, "Prefix": prefix}
    found: list[tuple[str, str]] = []
    while True:
        try:
            page = await connection.call("list_multipart_uploads", params)
        except RequestFailed as failed:
            if failed.fault.kind not in _NONE:
                raise
            break
        uploads = page.get("Uploads", [])
        found += [(u["Key"], u["UploadId"]) for u in uploads if not exact or u["Key"] == prefix]
        # Some servers say "truncated" without a marker for the next page.
        if not (page.get("IsTruncated") and uploads and page.get("NextKeyMarker")):
            break
        params["KeyMarker"] = page["NextKeyMarker"]
        params["UploadIdMarker"] = page.get("NextUploadIdMarker", "")
    for key, upload_id in found:
        await _abort(connection, {**place, "Key": key, "UploadId": upload_id})
    return len(found)


async def _clean_up(connection: Connection, name: str, known: _Created) -> None:
    dangling = connection.counts.dangling
    unsure = known.unsure or name in dangling
    dangling.add(name)
    with contextlib.suppress(RequestFailed):  # the original error is raised instead
        if known.upload_id is not None:
            place = {"Bucket": connection.location.bucket, "Key": name}
            await _abort(connection, {**place, "UploadId": known.upload_id})
        if unsure:
            await abort_uploads(connection, name, exact=True)
        dangling.discard(name)


async def _abort(connection: Connection, params: dict[str, Any]) -> None:
    # A part in flight may revive an aborted upload: repeat until the server does not know it.
    for _ in range(3):
        try:
            await connection.call("abort_multipart_upload", params, deadline_s=_ABORT_DEADLINE_S)
        except RequestFailed as failed:  # noqa: PERF203
            if failed.fault.kind in ("no_upload", "missing"):
                return
            raise
