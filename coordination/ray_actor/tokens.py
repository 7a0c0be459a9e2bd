"""Ray's token authentication: which token this process sends, and what it means to be refused.

A Ray may ask for a token. Whether to send one, and which, Ray takes from `RAY_AUTH_*` in the
environment and from `~/.ray/auth_token`, and remembers it for the life of the process. The user's
settings are for the user's clusters; a local Ray of ours has a token of its own, which is used while
connecting to it and forgotten afterwards. Rays before 2.52 have no tokens and ignore all this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from smdist.errors import CoordinationError

__all__ = ["check", "forget", "is_refusal", "refusal", "use_any", "used", "with_token"]

_MODE, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
_VARIABLES = frozenset({_MODE, _PATH, "RAY_AUTH_TOKEN", "RAY_ENABLE_K8S_TOKEN_AUTH"})
_SETUP = "ray._private.authentication.authentication_token_setup"
_PING_S = 10.0


def with_token(environ: Mapping[str, str], path: str) -> dict[str, str]:
    """`environ` with the token in the file `path`, or none for "", whatever the account has."""
    own = {_MODE: "token", _PATH: path} if path else {_MODE: "disabled"}
    return {name: text for name, text in environ.items() if name not in _VARIABLES} | own


@contextlib.contextmanager
def used(path: str) -> Iterator[None]:
    """Have Ray read its settings as `with_token`; it remembers them until they are forgotten."""
    before = {name: os.environ.pop(name) for name in _VARIABLES & os.environ.keys()}
    os.environ.update(with_token({}, path))
    try:
        forget()
        yield
    finally:
        for name in _VARIABLES & os.environ.keys():
            del os.environ[name]
        os.environ.update(before)


def forget() -> None:
    """Have Ray read its settings again, for the next connection."""
    raylet = import_module("ray._raylet")
    loader = getattr(raylet, "AuthenticationTokenLoader", None)
    if loader is not None:
        raylet.Config.initialize("")  # first: threads of Ray that end late look for a token
        loader.instance().reset_cache()


def use_any() -> None:
    """Send the token of the account, if it has one: as Ray does for a cluster that it has found."""
    with contextlib.suppress(ImportError, AttributeError):
        import_module(_SETUP).maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def check(ray: Any, address: str) -> None:
    """Raise at once what Ray would after many attempts: it refuses us, or does not answer."""
    if not hasattr(ray.exceptions, "AuthenticationError"):
        return
    with contextlib.suppress(ImportError, AttributeError, TypeError):  # another Ray than we know
        # First: within Ray's core, the lack of a token ends the process.
        import_module(_SETUP).ensure_token_if_auth_enabled(None, create_token_if_missing=False)
        if address.startswith("ray://"):
            _ping(ray, address.removeprefix("ray://"))
        else:
            import_module("ray._raylet").GcsClient(address=address)


def _ping(ray: Any, address: str) -> None:
    """A server for clients tells them no reason. Anything but a refusal is for Ray to find out."""
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


def is_refusal(error: BaseException | None) -> bool:
    """Or of one that it came from: Ray tells some only in the text of another."""
    while error is not None:
        if "AuthenticationError" in f"{type(error).__name__} {error}":
            return True
        error = error.__cause__ or error.__context__
    return False


def refusal(address: str, local: bool) -> CoordinationError:
    sent = _sends_one()
    cause = "refused our token" if sent else "asks for a token and we have none"
    if local:
        remedy = "its own is not as it was; smdist coordinator stop, then start"
    elif sent:
        remedy = "set RAY_AUTH_TOKEN_PATH, or RAY_AUTH_TOKEN, to that of the cluster"
    else:
        remedy = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH, a file with the cluster's"
    return CoordinationError(f"the Ray at {address} {cause}: {remedy}")


def _sends_one() -> bool:
    try:
        loader = import_module("ray._raylet").AuthenticationTokenLoader
        return bool(loader.instance().has_token())
    except Exception:  # noqa: BLE001 - a file that cannot be read, or a Ray without tokens
        return False
