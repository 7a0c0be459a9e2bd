"""Can this process write there? Asked synchronously, answered within seconds.

A server that is overloaded or restarts is asked again for a while: a whole job hangs on the answer.

Writes one small object of a fixed name and deletes it, since nothing else tells read-only
credentials from others on every server. The name begins with a dot, so no store lists it, and it is
the same for all: credentials that may not delete leave one such object behind, not one per rank.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.exceptions as sdk
import botocore.session
from botocore.config import Config

from smdist.errors import StoreError, StoreForbidden
from smdist.storage.s3.client import client_settings, config_values, ours, share_models
from smdist.storage.s3.errors import (
    Fault,
    NoReceipt,
    RequestFailed,
    check_receipt,
    classify,
    refusal,
)
from smdist.storage.s3.options import S3Location

__all__ = ["probe"]

_KEY = ".smdist-check"
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.2, 2.0
_SOON_S = 2.0  # what refuses connections is more likely a wrong address than one that comes back
_RETRIEVAL = {"CredentialRetrievalError", "MetadataRetrievalError"}
_CLEAR = {"NoSuchBucket", "SignatureDoesNotMatch", "InvalidAccessKeyId"}
_SDK = (sdk.BotoCoreError, sdk.ClientError, OSError, NoReceipt)


def probe(location: S3Location, *, timeout_s: float = 14.0) -> None:
    """Raises StoreForbidden or StoreError that say which of bucket, key, secret, rights, network.

    Each attempt waits for a silent server for two sevenths of `timeout_s`, none begins in the last two.
    """
    patience_s, began, attempt = timeout_s * 2 / 7, time.monotonic(), 0
    while True:
        attempt += 1
        try:
            _try(location, patience_s)
        except _Failed as failed:
            bound = min(_FIRST_PAUSE_S * 2**attempt, _MOST_PAUSE_S)
            pause_s = max(random.uniform(bound / 2, bound), min(failed.fault.pause_s, bound))
            waited_s = time.monotonic() - began + pause_s
            if _again(failed.fault, waited_s, attempt, timeout_s - patience_s):
                time.sleep(pause_s)
                continue
            failed.attempts = attempt
            raise _told(location, patience_s, failed) from failed.error
        return


class _Failed(RequestFailed):
    def __init__(self, endpoint: str, fault: Fault, error: BaseException) -> None:
        super().__init__(fault, error, attempts=1, unsure=False)
        self.endpoint = endpoint


def _again(fault: Fault, waited_s: float, attempt: int, limit_s: float) -> bool:
    if fault.kind in ("transient", "throttled"):
        return waited_s < limit_s
    # A service of the machine that hands out credentials may be busy when all its ranks ask.
    passing = fault.kind == "unreachable" or fault.code in _RETRIEVAL
    return passing and (waited_s < _SOON_S or attempt < 2)


def _try(location: S3Location, patience_s: float) -> None:
    with _client(location, patience_s) as client:
        place = {"Bucket": location.bucket, "Key": location.name(_KEY)}
        check_receipt("put_object", client.put_object(**place, Body=b"smdist\n"))
        with contextlib.suppress(*_SDK):  # the right to write without that to delete is enough
            client.delete_object(**place)


@contextlib.contextmanager
def _client(location: S3Location, patience_s: float) -> Iterator[Any]:
    """Raises _Failed for whatever the SDK raises in the block, or before it."""
    endpoint = location.endpoint_url or ""
    try:
        client = _made(location, patience_s)
        endpoint = str(client.meta.endpoint_url)
        with contextlib.closing(client), ours():
            yield client
    except _SDK as error:
        fault = classify(error)
        if fault is None:
            raise
        raise _Failed(endpoint, fault, error) from error


def _made(location: S3Location, patience_s: float) -> Any:
    session = botocore.session.Session(profile=location.profile)
    share_models(session)
    settings = client_settings(location, session)
    values = config_values(settings, connect_s=patience_s, read_s=patience_s)
    return boto3.Session(botocore_session=session).client(
        "s3",
        region_name=settings.region,
        endpoint_url=settings.endpoint_url,
        config=Config(**values),
    )


def _told(location: S3Location, patience_s: float, failed: _Failed) -> StoreError:
    fault = failed.fault
    # A server that does not write answers "internal error" all the time, if it is rclone.
    suspect = fault.kind in ("denied", "transient") and isinstance(failed.error, sdk.ClientError)
    if suspect and fault.code not in _CLEAR and _may_read(location, patience_s):
        return _read_only(location, failed)
    return refusal(location, failed.endpoint, "", "write", failed)


def _may_read(location: S3Location, patience_s: float) -> bool:
    try:
        with _client(location, patience_s) as client:
            client.list_objects_v2(Bucket=location.bucket, Prefix=location.name(""), MaxKeys=1)
    except _Failed:
        return False
    return True


def _read_only(location: S3Location, failed: RequestFailed) -> StoreError:
    code = failed.fault.code
    what = f"bucket {location.bucket!r} can be read but not written"
    if failed.fault.kind == "denied":
        why = "the credentials or the server are read-only; writing needs s3:PutObject"
        return StoreForbidden(location.url, "", "write", f"{what} ({code}): {why}")
    why = "the server is read-only, or fails"
    detail = f"{what} ({code}, {failed.attempts} attempts): {why}"
    return StoreError(location.url, "", "write", detail)
