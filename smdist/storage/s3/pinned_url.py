"""The URL of a place as this process finds it, for a process in another environment."""

from __future__ import annotations

import dataclasses

import botocore.session

from smdist.storage.s3.client import client_settings, share_models
from smdist.storage.s3.options import AWS, parse_s3_url

__all__ = ["pin"]


def pin(url: str) -> str:
    """`url` with endpoint and region written out. Reads environment and profile, no network.

    Credentials are whatever the other process has; so no profile is written out, as one in a URL
    would come before credentials in the environment.
    """
    location = parse_s3_url(url)
    session = botocore.session.Session(profile=location.profile)
    share_models(session)
    settings = client_settings(location, session)
    endpoint = settings.endpoint_url or AWS
    return dataclasses.replace(location, endpoint_url=endpoint, region=settings.region).url
