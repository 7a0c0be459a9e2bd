"""Check within seconds whether this process can write to a bucket. Synchronous.

A server that is overloaded or restarting is asked again for a while: a whole job depends on the answer.

The probe writes one small object and deletes it: on many servers nothing else detects read-only
credentials. Its name begins with a dot, so no store lists it. All ranks use the same name:
credentials without the right to delete leave one such object behind, not one per rank.
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
from smdist.storage.s3.client import client_settings, config_values, share_models, smdist_requests
from smdist.storage.s3.errors import (
    Fault,
    NoReceipt,
    RequestFailed,
    check_receipt,
    classify,
    to_store_error,
)
from smdist.storage.s3.options import S3Location

__all__ = ["probe"]

_KEY = ".smdist-check"
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 2.0
_REFUSED_RETRY_S = 2.0  # a refused connection is more likely a wrong address than a restart
_CREDENTIAL_ERRORS = {"CredentialRetrievalError", "MetadataRetrievalError"}
_CERTAIN = {"NoSuchBucket", "SignatureDoesNotMatch", "InvalidAccessKeyId"}
_SDK = (sdk.BotoCoreError, sdk.ClientError, OSError, NoReceipt)


def probe(location: S3Location, *, timeout_s: float = 14.0) -> None:
    """Write and delete a small object. Raise StoreForbidden or StoreError with the exact cause.

    Each attempt waits up to two sevenths of `timeout_s`; none begins in the last two sevenths.
    """
    attempt_s, began, attempt = timeout_s * 2 / 7, time.monotonic(), 0
    while True:
        attempt += 1
        try:
            _try(location, attempt_s)
        except _ProbeFailed as failed:
            bound = min(_FIRST_PAUSE_S * 2**attempt, _MAX_PAUSE_S)
            pause_s = max(random.uniform(bound / 2, bound), min(failed.fault.pause_s, bound))
            waited_s = time.monotonic() - began + pause_s
            if _should_retry(failed.fault, waited_s, attempt, timeout_s - attempt_s):
                time.sleep(pause_s)
                continue
            failed.attempts = attempt
            raise _diagnose(location, attempt_s, failed) from failed.error
        return


class _ProbeFailed(RequestFailed):
    def __init__(self, endpoint: str, fault: Fault, error: BaseException) -> None:
        super().__init__(fault, error, attempts=1, unsure=False)
        self.endpoint = endpoint


def _should_retry(fault: Fault, waited_s: float, attempt: int, limit_s: float) -> bool:
    if fault.kind in ("transient", "throttled"):
        return waited_s < limit_s
    # The credential service of the machine may be busy when all its ranks ask at once.
    passing = fault.kind == "unreachable" or fault.code in _CREDENTIAL_ERRORS
    return passing and (waited_s < _REFUSED_RETRY_S or attempt < 2)


def _try(location: S3Location, attempt_s: float) -> None:
    with _client(location, attempt_s) as client:
        place = {"Bucket": location.bucket, "Key": location.name(_KEY)}
        check_receipt("put_object", client.put_object(**place, Body=b"smdist\n"))
        with contextlib.suppress(*_SDK):  # the right to delete is optional
            client.delete_object(**place)


@contextlib.contextmanager
def _client(location: S3Location, attempt_s: float) -> Iterator[Any]:
    """Yield a client; raise _ProbeFailed for every SDK error in the block, or before it."""
    endpoint = location.endpoint_url or ""
    try:
        client = _create_client(location, attempt_s)
        endpoint = str(client.meta.endpoint_url)
        with contextlib.closing(client), smdist_requests():
            yield client
    except _SDK as error:
        fault = classify(error)
        if fault is None:
            raise
        raise _ProbeFailed(endpoint, fault, error) from error


def _create_client(location: S3Location, attempt_s: float) -> Any:
    session = botocore.session.Session(profile=location.profile)
    share_models(session)
    settings = client_settings(location, session)
    values = config_values(settings, connect_s=attempt_s, read_s=attempt_s)
    return boto3.Session(botocore_session=session).client(
        "s3",
        region_name=settings.region,
        endpoint_url=settings.endpoint_url,
        config=Config(**values),
    )


def _diagnose(location: S3Location, attempt_s: float, failed: _ProbeFailed) -> StoreError:
    fault = failed.fault
    # A read-only rclone server always answers "internal error".
    suspect = fault.kind in ("denied", "transient") and isinstance(failed.error, sdk.ClientError)
    if suspect and fault.code not in _CERTAIN and _may_read(location, attempt_s):
        return _read_only(location, failed)
    return to_store_error(location, failed.endpoint, "", "write", failed)


def _may_read(location: S3Location, attempt_s: float) -> bool:
    try:
        with _client(location, attempt_s) as client:
            client.list_objects_v2(Bucket=location.bucket, Prefix=location.name(""), MaxKeys=1)
    except _ProbeFailed:
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
