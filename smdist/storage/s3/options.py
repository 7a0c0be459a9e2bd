"""Bucket, endpoint and limits of an S3 store. Pure: no SDK, no network.

`s3://bucket/prefix?endpoint_url=http://host:9000&region=eu-west-1` and the options `profile`,
`addressing_style` (path, virtual, auto) and `payload_signing` (on, off). Everything else comes from
the usual AWS environment and profile (AWS_ENDPOINT_URL, AWS_REGION, ...). Credentials come only from
there: a URL is shown in messages and stored in files.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlsplit

from smdist.errors import ConfigurationError, UnknownKey
from smdist.messages import redact_url

__all__ = ["AWS", "S3Location", "S3Options", "check_endpoint", "is_loopback", "parse_s3_url"]

AWS = "aws"  # as an endpoint: AWS itself, regardless of the environment
_QUERY = ("addressing_style", "endpoint_url", "payload_signing", "profile", "region")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_ARN = re.compile(r"arn:[A-Za-z0-9-]+:s3[A-Za-z0-9-]*:[A-Za-z0-9-]*:[0-9]*:[A-Za-z0-9:./-]+")
_SECRET = re.compile(r"secret|token|password|access_?key|credential", re.IGNORECASE)
_CHOICES = {"addressing_style": ("auto", "path", "virtual"), "payload_signing": ("off", "on")}


@dataclass(frozen=True)
class S3Location:
    bucket: str
    prefix: str = ""  # no slash at either end
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing_style: str | None = None
    payload_signing: str | None = None

    @property
    def url(self) -> str:
        """Return the URL of this location. It holds no secret: `parse_s3_url` accepts none."""
        place = f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        given = [(name, value) for name in _QUERY if (value := getattr(self, name)) is not None]
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in given)
        return f"{place}?{query}" if query else place

    def name(self, key: str) -> str:
        """Return the key in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key


@dataclass(frozen=True)
class S3Options:
    """Limits of one store.

    An operation begins no new attempt after `deadline_s`. An attempt ends when no byte moves for
    `stall_s`, or when it is slower than `slowest_bytes_per_s` on average.
    """

    concurrency: int = 16  # requests at once, and connections kept
    in_flight_bytes: int = 128 << 20  # of bodies, of puts and gets together
    # Objects from this size on are uploaded in parts. A usual segment is one request: in parts it
    # would be six and take half as much CPU time again. Several segments are sent at once anyway.
    multipart_bytes: int = 64 << 20
    part_bytes: int = 16 << 20
    connect_timeout_s: float = 5.0
    stall_s: float = 30.0
    slowest_bytes_per_s: int = 64 << 10
    deadline_s: float = 60.0
    first_pause_s: float = 0.1
    most_pause_s: float = 5.0
    look_again_s: float = 2.0  # minimum time between two checks for changed credentials
    probe_timeout_s: float = 14.0  # of the first check, with its retries

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.in_flight_bytes < 1:
            raise ConfigurationError(
                "concurrency and in_flight_bytes of an S3 store must be positive"
            )
        if self.part_bytes < 5 << 20:
            raise ConfigurationError("part_bytes is too small: S3 accepts no parts below 5 MiB")


def parse_s3_url(url: str) -> S3Location:
    # Not urlsplit: as in other S3 tools, `#` and `%` are plain characters of a prefix.
    place, _, query = url[url.index("://") + 3 :].partition("?")
    bucket, _, prefix = place.partition("/")
    if "@" in bucket or (":" in bucket and not bucket.startswith("arn:")):
        raise ConfigurationError(
            "an s3:// URL must not contain credentials or a port: use AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY or a profile, and ?endpoint_url= for another server"
        )
    if bucket.startswith("arn:"):  # the name of an access point contains a slash
        head, _, prefix = prefix.partition("/")
        bucket = f"{bucket}/{head}" if head else bucket
    if not (_BUCKET.fullmatch(bucket) or _ARN.fullmatch(bucket)):
        raise ConfigurationError(
            f"{redact_url(bucket)!r} is not a bucket name: write s3://bucket/prefix"
        )
    prefix = prefix.strip("/")
    if "//" in prefix or any(part in (".", "..") for part in prefix.split("/")):
        raise ConfigurationError(
            f"{redact_url(prefix)!r} is not a valid prefix: write s3://bucket/a/b"
        )
    return S3Location(bucket, prefix, **_options(query))


def _options(query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if _SECRET.search(name):
            raise ConfigurationError(
                f"{name} must not be in a URL, which is shown in messages: use the AWS "
                "environment variables or a profile"
            )
        if name not in _QUERY:
            raise UnknownKey(redact_url(name), _QUERY, "an s3:// URL")
        if not value:
            raise ConfigurationError(f"{name} of the s3:// URL is empty")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ConfigurationError(f"{name} of an s3:// URL is one of {_CHOICES[name]}")
        found[name] = value
    if found.get("endpoint_url", AWS) != AWS:
        check_endpoint(found["endpoint_url"])
    return found


def check_endpoint(endpoint_url: str) -> None:
    try:
        parts = urlsplit(endpoint_url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        secret = parts.username is not None or bool(parts.query)
        _ = parts.port
    except ValueError:
        valid = secret = False
    if secret:
        raise ConfigurationError(
            "the S3 endpoint_url must not contain credentials or a query: use the AWS "
            "environment variables or a profile"
        )
    if not valid:
        raise ConfigurationError(
            f"{redact_url(endpoint_url)!r} is not an endpoint_url: write http://host:port or https://host"
        )


def is_loopback(endpoint_url: str) -> bool:
    host = urlsplit(endpoint_url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
