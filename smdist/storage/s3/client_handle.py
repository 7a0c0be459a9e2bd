"""A client of the SDK and the credentials that it signs with."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import botocore.handlers
from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession

from smdist.storage.s3.client import ClientSettings, client_settings, config_values, share_models
from smdist.storage.s3.options import S3Location, S3Options

__all__ = ["ClientHandle", "create_client", "create_client_if_renewed"]


class ClientHandle:
    """A client that is closed once it is retired and no request uses it."""

    def __init__(
        self, client: Any, settings: ClientSettings, credentials: Any, closing: Any
    ) -> None:
        self.client, self.settings, self._credentials = client, settings, credentials
        self._closing, self._users, self._retired = closing, 0, False

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            await self._close_if_free()

    async def credentials(self) -> tuple[str, str, str] | None:
        """Return access key, secret key and token, None without credentials."""
        if self._credentials is None:
            return None
        frozen = await self._credentials.get_frozen_credentials()
        return frozen.access_key, frozen.secret_key, frozen.token or ""

    async def retire(self) -> None:
        self._retired = True
        await self._close_if_free()

    async def _close_if_free(self) -> None:
        if self._retired and not self._users:
            await self._closing.aclose()


async def create_client(location: S3Location, options: S3Options) -> ClientHandle:
    session = AioSession(profile=location.profile)
    share_models(session)
    settings = client_settings(location, session)
    values = config_values(settings, connect_s=options.connect_timeout_s, read_s=options.stall_s)
    config = AioConfig(max_pool_connections=options.concurrency, **values)
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            session.create_client(
                "s3",
                region_name=settings.region,
                endpoint_url=settings.endpoint_url,
                config=config,
            )
        )
        # "Expect: 100-continue" costs a round trip per put, and aiohttp waits for its answer
        # without a timeout.
        client.meta.events.unregister("before-call.s3", botocore.handlers.add_expect_header)
        credentials = await session.get_credentials()  # the client has loaded them by now
        return ClientHandle(client, settings, credentials, stack.pop_all())
    raise AssertionError  # the exit stack suppresses no error


async def create_client_if_renewed(
    location: S3Location, options: S3Options, current: ClientHandle
) -> ClientHandle | None:
    """Return a client with other credentials than `current`, None if they are unchanged."""
    before = await current.credentials()
    fresh = await create_client(location, options)
    try:
        found = await fresh.credentials()
    except BaseException:
        await fresh.retire()
        raise
    if found is None or found == before:
        await fresh.retire()
        return None
    return fresh
