"""Settings of an SDK client for a location, the same for aiobotocore and boto3.

- Signing of payloads: over TLS and to a loopback address a body is sent as UNSIGNED-PAYLOAD, which
  halves the CPU time of a put. TLS protects it, and smdist verifies its own CRC32C on read. Over plain
  HTTP to another machine the body is signed (SHA-256): nothing else protects it. Headers are always
  signed. `?payload_signing=` overrides this.
- Checksums only "when_required": smdist has its own. Some servers answer a range with the checksum of
  the whole object, which the SDK then rejects.
- Addressing: by path on custom endpoints (few have wildcard DNS), else as the SDK does.
- Retries: none in the SDK. One layer owns them (`connection.py`): it knows whether an attempt may have
  taken effect, keeps a deadline, retries bodies too, and counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from smdist.storage.s3.options import AWS, S3Location, check_endpoint, is_loopback

__all__ = ["ClientSettings", "client_settings", "config_values", "share_models", "smdist_requests"]

_DEFAULT_REGION = "us-east-1"
_loader: Any = None
_is_smdist_request: ContextVar[bool] = ContextVar("smdist_request", default=False)


@dataclass(frozen=True)
class ClientSettings:
    endpoint_url: str | None  # None: AWS itself
    region: str
    addressing_style: str | None  # None: as the profile says
    payload_signing: bool

    @property
    def is_aws(self) -> bool:
        return self.endpoint_url is None


@contextlib.contextmanager
def smdist_requests() -> Iterator[None]:
    """Mark requests as made by smdist: the SDK does not log them, with their session token."""
    token = _is_smdist_request.set(True)
    try:
        yield
    finally:
        _is_smdist_request.reset(token)


def _may_log(record: logging.LogRecord) -> bool:
    return record.levelno > logging.DEBUG or not _is_smdist_request.get()


# At DEBUG these log whole requests and answers, whose headers contain the token.
for _name in ("botocore.auth", "botocore.endpoint", "botocore.parsers"):
    logging.getLogger(_name).addFilter(_may_log)


def share_models(session: Any) -> None:
    """Parse the SDK's description of S3 once per process, not once per client (0.1 s)."""
    global _loader
    if _loader is None:
        _loader = session.get_component("data_loader")
    session.register_component("data_loader", _loader)


def client_settings(location: S3Location, session: Any) -> ClientSettings:
    """Return the settings for `location`; `session` is a botocore session for its profile.

    Reads files, not the network.
    """
    profile = session.get_scoped_config()
    endpoint = location.endpoint_url or _configured_endpoint(profile, session.full_config)
    endpoint = None if endpoint == AWS else endpoint
    if endpoint is not None:
        check_endpoint(endpoint)
    style = location.addressing_style
    if style is None and endpoint is not None and "addressing_style" not in _section(profile, "s3"):
        style = "path"
    signing = endpoint is not None and endpoint.startswith("http:") and not is_loopback(endpoint)
    if location.payload_signing is not None:
        signing = location.payload_signing == "on"
    # Unlike all other tools of AWS, the SDK knows only AWS_DEFAULT_REGION.
    region = location.region or os.environ.get("AWS_REGION")
    region = region or session.get_config_variable("region") or _DEFAULT_REGION
    return ClientSettings(endpoint, region, style, signing)


def config_values(settings: ClientSettings, *, connect_s: float, read_s: float) -> dict[str, Any]:
    s3: dict[str, Any] = {"payload_signing_enabled": settings.payload_signing}
    if settings.addressing_style is not None:
        s3["addressing_style"] = settings.addressing_style
    return {
        "s3": s3,
        "signature_version": "s3v4",
        "ignore_configured_endpoint_urls": True,  # `client_settings` has read them
        "connect_timeout": connect_s,
        "read_timeout": read_s,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "user_agent_extra": "smdist",
    }


def _configured_endpoint(profile: Mapping[str, Any], full: Mapping[str, Any]) -> str | None:
    """Return the endpoint of environment and profile, in the order of the AWS documentation.

    The SDK finds it too, but reports it too late.
    """
    ignore = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
    ignore = ignore or str(profile.get("ignore_configured_endpoint_urls", ""))
    if ignore.lower() == "true":
        return None
    services = _section(full.get("services", {}), str(profile.get("services", "")))
    return (
        os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or _section(services, "s3").get("endpoint_url")
        or profile.get("endpoint_url")
        or None
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
