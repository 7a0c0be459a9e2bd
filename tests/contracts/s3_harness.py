"""The store contract on a bucket of a real server."""

from __future__ import annotations

from pathlib import Path

from smdist.storage import open_store
from smdist.storage.store import Store
from tests.servers.s3 import Server

__all__ = ["S3Harness"]


class S3Harness:
    """Looks at the files of rclone, and asks moto through a client of its own."""

    def __init__(self, server: Server, bucket: str) -> None:
        self.server, self.bucket = server, server.make_bucket(bucket)
        # rclone keeps objects as files, ignores conditions, and takes the delete of a "folder" or of
        # something below an object for one of what is there.
        self.files = server.folder is not None
        self._client = server.client()

    def open(self) -> Store:
        return open_store(self.server.url(self.bucket))

    def plant(self, key: str, data: bytes) -> None:
        if (path := self._path(key)) is None:
            self._client.put_object(Bucket=self.bucket, Key=f"run/{key}", Body=data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def peek(self, key: str) -> bytes | None:
        if (path := self._path(key)) is not None:
            return path.read_bytes() if path.is_file() else None
        try:
            found = self._client.get_object(Bucket=self.bucket, Key=f"run/{key}")
        except self._client.exceptions.NoSuchKey:
            return None
        data: bytes = found["Body"].read()
        return data

    def keys(self) -> list[str]:
        if (root := self._path("")) is not None:
            return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
        found = self._client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return sorted(entry["Key"].removeprefix("run/") for entry in found)

    def _path(self, key: str) -> Path | None:
        folder = self.server.folder
        return None if folder is None else folder / self.bucket / "run" / key
