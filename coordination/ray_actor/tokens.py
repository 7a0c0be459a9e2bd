"""Choose the token that this process sends to Ray, and recognise that Ray rejected it.

A Ray may require a token. Ray takes it from `RAY_AUTH_*` in the environment and from
`~/.ray/auth_token`, and caches it for the life of the process. The user's settings are for the user's
clusters. A local Ray has a token of its own, which is used while connecting and cleared afterwards.
Ray before 2.52 has no tokens and ignores all this.

Called by `launcher` in the driver, in this order: `use_token` or `use_account_token`, `check`, then
`is_rejection` for errors of Ray, `clear_cache` last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from smdist.errors import CoordinationError

__all__ = [
    "check",
    "clear_cache",
    "is_rejection",
    "rejection",
    "use_account_token",
    "use_token",
    "with_token",
]

_MODE, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
_VARIABLES = frozenset({_MODE, _PATH, "RAY_AUTH_TOKEN", "RAY_ENABLE_K8S_TOKEN_AUTH"})
_SETUP = "ray._private.authentication.authentication_token_setup"
_PING_S = 10.0


def with_token(environ: Mapping[str, str], path: str) -> dict[str, str]:
    """Return `environ` with the token in the file `path`, or with none for ""."""
    own = {_MODE: "token", _PATH: path} if path else {_MODE: "disabled"}
    return {name: text for name, text in environ.items() if name not in _VARIABLES} | own


@contextlib.contextmanager
def use_token(path: str) -> Iterator[None]:
    """Have Ray read the token in the file `path` within a block; it stays cached afterwards."""
    before = {name: os.environ.pop(name) for name in _VARIABLES & os.environ.keys()}
    os.environ.update(with_token({}, path))
    try:
        clear_cache()
        yield
    finally:
        for name in _VARIABLES & os.environ.keys():
            del os.environ[name]
        os.environ.update(before)


def clear_cache() -> None:
    """Have Ray read its settings again for the next connection."""
    raylet = import_module("ray._raylet")
    loader = getattr(raylet, "AuthenticationTokenLoader", None)
    if loader is not None:
        raylet.Config.initialize("")  # first: threads of Ray that end late read a token
        loader.instance().reset_cache()


def use_account_token() -> None:
    """Send the token of the account, if it has one, as Ray does for a cluster that it finds."""
    with contextlib.suppress(ImportError, AttributeError):
        import_module(_SETUP).maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def check(ray: Any, address: str) -> None:
    """Raise at once what Ray would raise after many attempts: it rejects us, or does not answer."""
    if not hasattr(ray.exceptions, "AuthenticationError"):
        return
    with contextlib.suppress(ImportError, AttributeError, TypeError):  # an unknown version of Ray
        # First: in the core of Ray a missing token ends the process.
        import_module(_SETUP).ensure_token_if_auth_enabled(None, create_token_if_missing=False)
        if address.startswith("ray://"):
            _ping(ray, address.removeprefix("ray://"))
        else:
            import_module("ray._raylet").GcsClient(address=address)


def _ping(ray: Any, address: str) -> None:
    """Raise AuthenticationError if a client server rejects us: it tells its clients no reason."""
    grpc = import_module("grpc")
    channel = import_module("ray._private.grpc_utils").init_grpc_channel(address)
    messages = import_module("ray.core.generated.ray_client_pb2")
    stub = import_module("ray.core.generated.ray_client_pb2_grpc").RayletDriverStub(channel)
    try:
        ping = messages.ClusterInfoRequest(type=messages.ClusterInfoType.PING)
        stub.ClusterInfo(ping, timeout=_PING_S)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise ray.exceptions.AuthenticationError(error.details()) from error
    finally:
        channel.close()


def is_rejection(error: BaseException | None) -> bool:
    """Return whether a token was rejected. Ray reports some cases only in another error's text."""
    while error is not None:
        if "AuthenticationError" in f"{type(error).__name__} {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def rejection(address: str, local: bool) -> CoordinationError:
    sent = _has_token()
    cause = "rejected our token" if sent else "requires a token and we have none"
    if local:
        remedy = "Its token has changed. Run: smdist coordinator stop, then start."
    elif sent:
        remedy = "Set RAY_AUTH_TOKEN_PATH, or RAY_AUTH_TOKEN, to the cluster's token."
    else:
        remedy = "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (a file with the token)."
    return CoordinationError(f"the Ray at {address} {cause}. {remedy}")


def _has_token() -> bool:
    try:
        loader = import_module("ray._raylet").AuthenticationTokenLoader
        return bool(loader.instance().has_token())
    except Exception:  # noqa: BLE001 - a file that cannot be read, or a Ray without tokens
        return False
