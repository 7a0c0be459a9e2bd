"""Can this process write there? Asked synchronously, answered within seconds.

Writes one small object of a fixed name and deletes it, since nothing else tells read-only
credentials from others on every server. The name begins with a dot, so no store lists it, and it is
the same for all: credentials that may not delete leave one such object behind, not one per rank.
"""

from __future__ import annotations

import contextlib
from typing import Any

import boto3
import botocore.exceptions as sdk
import botocore.session
from botocore.config import Config

from smdist.errors import StoreError, StoreForbidden
from smdist.storage.s3_errors import Fault, RequestFailed, classify, refusal
from smdist.storage.s3_session import client_settings, config_values, share_models
from smdist.storage.s3_settings import S3Location

__all__ = ["probe"]

_KEY = ".smdist-check"
_ATTEMPTS = 2
_CLEAR = {"NoSuchBucket", "SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken"}
_SDK = (sdk.BotoCoreError, sdk.ClientError, OSError)


def probe(location: S3Location, *, timeout_s: float = 16.0) -> None:
    """Raises StoreForbidden or StoreError that say which of bucket, key, secret, rights, network."""
    endpoint = location.endpoint_url or ""
    try:
        client = _client(location, timeout_s / _ATTEMPTS / 2)
        endpoint = str(client.meta.endpoint_url)
        with contextlib.closing(client):
            _write(client, location)
    except _SDK as error:
        fault = classify(error)
        if fault is None:
            raise
        failed = RequestFailed(fault, error, attempts=1, unsure=False)
        raise refusal(location, endpoint, "", "write", failed) from error


def _client(location: S3Location, patience_s: float) -> Any:
    session = botocore.session.Session(profile=location.profile)
    share_models(session)
    settings = client_settings(location, session)
    values = config_values(settings, connect_s=patience_s, read_s=patience_s)
    values["retries"] = {"total_max_attempts": _ATTEMPTS, "mode": "standard"}
    return boto3.Session(botocore_session=session).client(
        "s3",
        region_name=settings.region,
        endpoint_url=settings.endpoint_url,
        config=Config(**values),
    )


def _write(client: Any, location: S3Location) -> None:
    place = {"Bucket": location.bucket, "Key": location.name(_KEY)}
    try:
        client.put_object(**place, Body=b"smdist\n")
    except sdk.ClientError as error:
        fault = classify(error)
        if fault is None or fault.code in _CLEAR or not _may_read(client, location):
            raise
        raise _read_only(location, fault) from error
    with contextlib.suppress(*_SDK):  # the right to write without that to delete is enough
        client.delete_object(**place)


def _may_read(client: Any, location: S3Location) -> bool:
    try:
        client.list_objects_v2(Bucket=location.bucket, Prefix=location.name(""), MaxKeys=1)
    except _SDK:
        return False
    return True


def _read_only(location: S3Location, fault: Fault) -> StoreError:
    kind = StoreForbidden if fault.kind == "denied" else StoreError
    detail = (
        f"bucket {location.bucket!r} can be read but not written ({fault.code}): the credentials or "
        "the server are read-only; writing needs s3:PutObject"
    )
    return kind(location.url, "", "write", detail)
