"""What a failed S3 request means, and what the user reads about it.

`classify` turns every exception of the SDK into a Fault. `to_store_error` turns that into a StoreError
with bucket, key, operation and remedy. The server's own words are quoted only for unknown codes, and
no text contains a credential.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import botocore.exceptions as sdk
from botocore.parsers import ResponseParserError

from smdist.errors import ObjectNotFound, StoreError, StoreForbidden, StoreFull
from smdist.storage.s3.options import S3Location

__all__ = [
    "Fault",
    "Kind",
    "NoReceipt",
    "RequestFailed",
    "check_receipt",
    "classify",
    "to_store_error",
]

Kind = Literal[
    "missing",  # no such key
    "exists",  # the condition of a write failed
    "range",  # begins after the end
    "no_upload",  # the multipart upload has ended
    "unsupported",  # the server has no such operation
    "foreign",  # not an S3 service
    "full",
    "denied",  # a retry gives the same answer
    "expired",  # credentials; there may be newer ones
    "throttled",
    "unreachable",  # the request never arrived
    "transient",  # it may have arrived
]

_KINDS: dict[str, Kind] = {
    "NoSuchKey": "missing",
    "PreconditionFailed": "exists",
    "InvalidRange": "range",
    "NoSuchUpload": "no_upload",
    "NotImplemented": "unsupported",
    "MethodNotAllowed": "unsupported",
    "QuotaExceeded": "full",
    "XMinioStorageFull": "full",
    "XMinioBackendDown": "transient",
    "ConditionalRequestConflict": "transient",
    "OperationAborted": "transient",
    "RequestTimeout": "transient",
    "RequestTimeoutException": "transient",
    "IncompleteBody": "transient",
    "InternalError": "transient",
    "BadDigest": "transient",
    "SlowDown": "throttled",
    "ServiceUnavailable": "throttled",
    "Throttling": "throttled",
    "ThrottlingException": "throttled",
    "ThrottledException": "throttled",
    "RequestThrottled": "throttled",
    "RequestThrottledException": "throttled",
    "RequestLimitExceeded": "throttled",
    "TooManyRequests": "throttled",
    "TooManyRequestsException": "throttled",
    "BandwidthLimitExceeded": "throttled",
    "ExpiredToken": "expired",
    "ExpiredTokenException": "expired",
    "TokenRefreshRequired": "expired",
    "RequestExpired": "expired",
}
_STATUS: dict[int, Kind] = {
    404: "missing",
    405: "unsupported",
    408: "transient",
    412: "exists",
    416: "range",
    429: "throttled",
    501: "unsupported",
    503: "throttled",
    507: "full",
}
# What a server returns for a stored object. A proxy may answer 200 without it.
_RECEIPTS = {
    "create_multipart_upload": "UploadId",
    "put_object": "ETag",
    "upload_part": "ETag",
    "complete_multipart_upload": "ETag",
}
_SECRET_KEY = "check AWS_SECRET_ACCESS_KEY or the secret in the profile"
_TOKEN = "the session token is wrong; renew or unset AWS_SESSION_TOKEN"
_REGION = "the bucket is in another region; set AWS_REGION or ?region="
_REMEDIES = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the name in the s3:// URL",
    "InvalidBucketName": "this is not a valid bucket name; correct the s3:// URL",
    "SignatureDoesNotMatch": f"the secret access key does not match the access key; {_SECRET_KEY}",
    "InvalidAccessKeyId": (
        "the server does not know this access key; check AWS_ACCESS_KEY_ID or the profile, and "
        "whether the endpoint is the right one"
    ),
    "InvalidToken": _TOKEN,
    "InvalidTokenId": _TOKEN,
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "RequestTimeTooSkewed": "the clock of this machine is wrong; set it",
    "NoCredentialsError": (
        "there are no AWS credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
        "AWS_PROFILE, or give the machine a role"
    ),
    "PartialCredentialsError": (
        "the AWS credentials are incomplete; set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    ),
    "ProfileNotFound": "there is no such AWS profile; check AWS_PROFILE or ?profile=",
}
_RIGHTS = {
    "put": "s3:PutObject (and s3:AbortMultipartUpload)",
    "write": "s3:PutObject",
    "get": "s3:GetObject, and s3:ListBucket to tell missing from forbidden",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
    "sweep": "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "403", "401"}
# What servers answer to credentials that were replaced or revoked.
_REJECTED = _DENIED | {
    "InvalidAccessKeyId",
    "InvalidToken",
    "InvalidTokenId",
    "SignatureDoesNotMatch",
    "NoCredentialsError",  # the file was just being written
}
_CREDENTIALS = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.ProfileNotFound,
)
_UNREACHABLE = (
    sdk.EndpointConnectionError,
    sdk.ConnectTimeoutError,
    sdk.ProxyConnectionError,
    aiohttp.ClientConnectorError,
)
_BROKEN = (
    sdk.ConnectionError,
    sdk.HTTPClientError,
    sdk.IncompleteReadError,
    sdk.ResponseStreamingError,
    ResponseParserError,
    aiohttp.ClientError,
)


@dataclass(frozen=True)
class Fault:
    kind: Kind
    code: str  # the server's, or the name of the SDK's exception
    detail: str = ""
    pause_s: float = 0.0  # minimum pause that the server asks for

    @property
    def retryable(self) -> bool:
        return self.kind in ("expired", "throttled", "unreachable", "transient")

    @property
    def rejected(self) -> bool:
        """Return whether other credentials may succeed."""
        return self.kind == "denied" and self.code in _REJECTED


class NoReceipt(Exception):
    """A write was answered with success, but without what a server returns for a stored object."""


def check_receipt(method: str, answer: Mapping[str, object]) -> None:
    """Raise NoReceipt unless `answer` to the SDK's `method` shows that the object was stored."""
    wanted = _RECEIPTS.get(method)
    if wanted is not None and not answer.get(wanted):
        raise NoReceipt(wanted)


class RequestFailed(Exception):
    """A failed request, inside of this package. `unsure`: an earlier attempt may have succeeded."""

    def __init__(self, fault: Fault, error: BaseException, *, attempts: int, unsure: bool) -> None:
        super().__init__(fault.code)
        self.fault, self.error, self.attempts, self.unsure = fault, error, attempts, unsure


def classify(error: BaseException) -> Fault | None:
    """Return the fault of network or server behind `error`, None for a programming error."""
    name = type(error).__name__
    if isinstance(error, sdk.ClientError):
        return _answer(error.response, worded=not error.operation_name.startswith("Head"))
    if isinstance(error, NoReceipt):
        return Fault("transient", name, str(error))
    if isinstance(error, _CREDENTIALS):
        return Fault("denied", name)
    if isinstance(error, (sdk.CredentialRetrievalError, sdk.MetadataRetrievalError)):
        return Fault("expired", name)
    if isinstance(error, (sdk.SSLError, aiohttp.ClientSSLError)):
        return Fault("unreachable", "SSLError")
    if isinstance(error, _UNREACHABLE) and not _was_connected(error):
        return Fault("unreachable", name, _reason(error))
    if isinstance(error, _BROKEN):
        code = "ConnectionLost" if _was_connected(error) else name
        return Fault("transient", code, _reason(error))
    if isinstance(error, (asyncio.TimeoutError, TimeoutError, OSError)):
        return Fault("transient", name, _reason(error))
    if isinstance(error, (sdk.BotoCoreError, ValueError)):
        return Fault("denied", name, _redacted(str(error)))
    return None


def _was_connected(error: BaseException) -> bool:
    """Check whether a connection broke: aiobotocore reports that as one that failed to open."""
    inner = getattr(error, "kwargs", {}).get("error")
    return isinstance(inner, aiohttp.ClientError) and not isinstance(
        inner, (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
    )


def _answer(response: Any, *, worded: bool) -> Fault:
    """Return the fault in an answer. `worded`: its body gives the code, unlike that of a HEAD."""
    error, meta = response.get("Error", {}), response.get("ResponseMetadata", {})
    code, status = str(error.get("Code", "")), int(meta.get("HTTPStatusCode", 0))
    kind, bare = _KINDS.get(code), code in ("", str(status))
    if kind is None and bare:
        kind = _STATUS.get(status)
        if worded and kind in ("missing", "unsupported"):
            kind = "foreign"
    if kind is None:
        kind = "transient" if status >= 500 or not status else "denied"
        kind = _STATUS.get(status, kind) if status in (429, 503, 507) else kind
    pause = str(meta.get("HTTPHeaders", {}).get("retry-after", ""))
    pause_s = float(pause) if pause.isdigit() else 0.0
    return Fault(kind, code or str(status), _redacted(str(error.get("Message", ""))), pause_s)


def to_store_error(
    location: S3Location, endpoint: str, key: str, operation: str, failed: RequestFailed
) -> StoreError:
    fault = failed.fault
    text = _text(location, endpoint, operation, fault)
    if failed.attempts > 1:
        text += f" ({failed.attempts} attempts)"
    if fault.kind == "missing" and operation == "get":
        return ObjectNotFound(location.url, key, operation)
    if fault.kind == "full":
        return StoreFull(location.url, key, operation, text)
    if fault.kind in ("denied", "expired", "unsupported"):
        return StoreForbidden(location.url, key, operation, text)
    return StoreError(location.url, key, operation, text)


def _text(location: S3Location, endpoint: str, operation: str, fault: Fault) -> str:
    bucket = f"bucket {location.bucket!r} at {_host(endpoint)}"
    if fault.code in _REMEDIES:
        return f"{bucket}: {fault.code}: {_REMEDIES[fault.code]}"
    if fault.code in _DENIED:
        rights = _RIGHTS.get(operation, "more rights")
        return f"{bucket}: {fault.code}: these credentials lack a permission; they need {rights}"
    if fault.code == "SSLError":
        return f"{bucket}: no secure connection; check the certificate or AWS_CA_BUNDLE"
    if fault.kind == "unreachable":
        why = f" ({fault.detail})" if fault.detail else ""
        return f"{bucket} cannot be reached{why}; check the endpoint and the network"
    if fault.kind == "expired":
        return f"{bucket}: {fault.code}: the credentials have expired; renew them"
    if fault.kind == "full":
        return f"{bucket}: {fault.code}: the store is full; free some space or raise the quota"
    if fault.kind == "unsupported":
        return f"{bucket}: {fault.code}: the server does not support this operation"
    if fault.code == "NoReceipt":
        return (
            f"{bucket} answers 200 without {fault.detail}: not stored; check endpoint and proxies"
        )
    if fault.kind == "foreign" or fault.code == "ResponseParserError":
        return f"{bucket}: {fault.code}: this is not an S3 service; check the endpoint"
    if fault.kind == "throttled":
        return f"{bucket}: {fault.code}: too many requests for the server; raise its limit"
    if fault.kind == "transient":
        why = f" ({fault.detail})" if fault.detail else ""
        return f"{bucket}: {fault.code}{why}: the server or the network failed; check both"
    return f"{bucket}: {fault.code}" + (f" ({fault.detail})" if fault.detail else "")


def _host(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}" if parts.hostname else "S3"


def _reason(error: BaseException) -> str:
    """Return the operating system's error text; the text of its wrappers repeats the URL."""
    kwargs = getattr(error, "kwargs", {})
    wrapped = kwargs.get("error")
    deepest = getattr(wrapped, "__cause__", None)
    for inner in (error, wrapped, deepest, error.__cause__, error.__context__):
        if isinstance(inner, aiohttp.ClientConnectorError):
            inner = inner.os_error
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
    return "no answer" if isinstance(error, asyncio.TimeoutError) else ""


def _redacted(text: str) -> str:
    # A server may quote the request: remove what looks like a signature or a key.
    text = re.sub(r"(?i)(signature|token|credential|secret)\S*[=:]\s*\S+", r"\1=...", text)
    return " ".join(text.split())[:200]
