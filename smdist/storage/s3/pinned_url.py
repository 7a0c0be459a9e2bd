"""An s3:// URL that means the same store in a process with another environment."""

from __future__ import annotations

import dataclasses

import botocore.session

from smdist.storage.s3.client import client_settings, share_models
from smdist.storage.s3.options import AWS, parse_s3_url

__all__ = ["pin"]


def pin(url: str) -> str:
    """Return `url` with explicit endpoint and region. Reads environment and profile, no network.

    The other process uses its own credentials. The profile is therefore left out: in a URL it would
    override credentials in the environment.
    """
    location = parse_s3_url(url)
    session = botocore.session.Session(profile=location.profile)
    share_models(session)
    settings = client_settings(location, session)
    endpoint = settings.endpoint_url or AWS
    return dataclasses.replace(location, endpoint_url=endpoint, region=settings.region).url
