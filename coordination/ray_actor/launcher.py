"""Connect to a Ray, give it our code, and start or find the coordinator there.

    with attach("local") as ray:           # starts your own Ray on this machine if none runs
        client = start(ray, Settings(watch="s3://bucket/jobs"))
        client.status()

Addresses: `local` is your own Ray on this machine, which stays when the caller ends. `auto` is the
cluster that this machine is a node of, also within a job that Ray has started. `host:port` is the same
by address. `ray://host:10001` is a cluster that this machine is no node of.

Synchronous, for command lines and drivers. One attachment per process at a time, as in Ray. Users import
this from `smdist.coordinator`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from smdist.coordination.ray_actor import local_head, tokens
from smdist.coordination.ray_actor.client import CoordinatorClient
from smdist.coordination.ray_actor.code_package import check_wheel, missing_code
from smdist.coordination.ray_actor.coordinator import (
    NAMESPACE,
    Coordinator,
    CoordinatorInfo,
    Settings,
    actor_name,
    check_watch_url,
)
from smdist.errors import ConfigurationError, CoordinationError

__all__ = ["Attachment", "address_option", "attach", "coordinators", "find", "start"]

_START_S = 120.0


class Attachment(msgspec.Struct, frozen=True):
    """A driver's connection to a Ray."""

    ray: Any  # the module, connected
    address: str
    local: bool  # started by smdist for this user
    own: bool = True  # false: the process was connected before


@contextlib.contextmanager
def attach(address: str = "local", *, start_local: bool = True) -> Iterator[Attachment]:
    """Connect to the Ray at `address` for a block; raise CoordinationError if that fails.

    Without `start_local` a `local` Ray has to run already. In a process that is connected already,
    `auto` uses that connection and keeps it.
    """
    if address == "local":
        with _attach_local(start_local) as attachment:
            yield attachment
        return
    if address != "auto":
        _check_address(address)
    ray = _import_ray()
    if ray.is_initialized() and address == "auto":
        yield Attachment(ray, address, local=False, own=False)
        return
    _check_unattached(ray)
    if address == "auto":
        address = _cluster_here()
    _connect(ray, address, {})
    try:
        yield Attachment(ray, address, local=False)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _attach_local(start_local: bool) -> Iterator[Attachment]:
    """Connect to the local Ray. If the block fails, end a new one on which nothing was started."""
    os.environ.update(local_head.LOOPBACK)  # before ray is imported: it reads this only once
    ray = _import_ray()
    _check_unattached(ray)
    _check_loopback()
    here, new = local_head.start() if start_local else (local_head.find(), False)
    if here is None:
        raise CoordinationError(
            "no coordinator runs on this machine. Start one: smdist coordinator start --watch URL"
        )
    attachment, stays = Attachment(ray, here.address, local=True), not new
    try:
        with tokens.use_token(here.token):
            _connect(ray, here.address, {}, local=True)
        try:
            yield attachment
            stays = True
        finally:
            with contextlib.suppress(Exception):  # it does not answer: nothing runs on it
                stays = stays or bool(coordinators(attachment))
            ray.shutdown()
    finally:
        tokens.clear_cache()
        if not stays:
            local_head.stop()


def _check_unattached(ray: Any) -> None:
    if ray.is_initialized():
        raise CoordinationError(
            "this process is already connected to a Ray. Use that one (address auto), call "
            "ray.shutdown() first, or use another process."
        )


def _check_loopback() -> None:
    """Raise if Ray was imported too early: it would look for the local Ray elsewhere, for minutes."""
    constants = importlib.import_module("ray._private.ray_constants")
    if getattr(constants, "ENABLE_RAY_CLUSTER", False):
        (name, value), *_ = local_head.LOOPBACK.items()
        raise CoordinationError(
            f"ray was imported without {name}={value} and cannot find the local Ray. "
            "Set it before the import, or use another process."
        )


def _connect(
    ray: Any, address: str, runtime_env: Mapping[str, Any], *, local: bool = False
) -> None:
    # ray.init replaces the SIGTERM handler of the caller.
    before = signal.getsignal(signal.SIGTERM) if _in_main_thread() else None
    try:
        if address != "auto":
            tokens.check(ray, address)
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env=dict(runtime_env) or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        if tokens.is_rejection(error):
            raise tokens.rejection(address, local) from error
        raise CoordinationError(f"no Ray at {address}: {error}") from error
    finally:
        if before not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _cluster_here() -> str:
    """Return the address of this machine's cluster, or `auto` to let Ray decide.

    Ray would also choose a Ray that listens on the loopback interface only. A driver that expects a
    cluster would then look for it elsewhere, for minutes.
    """
    if os.environ.get("RAY_ADDRESS", "auto") not in ("", "auto") or local_head.looks_for_loopback():
        return "auto"
    try:
        services = importlib.import_module("ray._private.services")
        found = {str(address) for address in services.find_gcs_addresses()}
    except (ImportError, AttributeError):
        return "auto"
    chosen = _choose_cluster(found)
    if chosen != "auto":  # with auto, Ray does so itself
        tokens.use_account_token()
    return chosen


def _choose_cluster(found: Collection[str]) -> str:
    """Return the one address of a cluster among all Rays of this machine, else `auto`."""
    reachable = sorted(one for one in found if not one.startswith(("127.", "localhost", "[::1]")))
    if found and not reachable:
        raise CoordinationError(
            "this machine is no node of a cluster: its only Ray is a local one, as smdist starts it. "
            "To use that, leave --address out."
        )
    return reachable[0] if len(reachable) == 1 < len(found) else "auto"


def find(attachment: Attachment, watch: str) -> CoordinatorClient | None:
    """Return the coordinator of that URL, or None."""
    try:
        handle = attachment.ray.get_actor(actor_name(watch), namespace=NAMESPACE)
    except ValueError:
        return None
    return CoordinatorClient(attachment.ray, handle, actor_name(watch))


def coordinators(attachment: Attachment) -> list[CoordinatorClient]:
    """Return all coordinators on that Ray."""
    named = attachment.ray.util.list_named_actors(all_namespaces=True)
    names = sorted(
        str(actor["name"])
        for actor in named
        if actor["namespace"] == NAMESPACE and str(actor["name"]).startswith("coordinator-")
    )
    found = []
    for name in names:
        with contextlib.suppress(ValueError):  # ended since it was listed
            actor = attachment.ray.get_actor(name, namespace=NAMESPACE)
            found.append(CoordinatorClient(attachment.ray, actor, name))
    return found


def start(
    attachment: Attachment, settings: Settings, *, wheel_path: Path | None = None
) -> CoordinatorClient:
    """Return the coordinator with these settings; start it if it does not run.

    Raise CoordinationError if one with other settings watches the same URL. If the cluster needs our
    code this connects again: Ray takes files from a driver only while it connects.
    """
    ray = attachment.ray
    settings = msgspec.structs.replace(settings, watch=check_watch_url(settings.watch))
    if wheel_path is not None:
        check_wheel(wheel_path)
    there = find(attachment, settings.watch)
    if there is not None:
        info = there.info()
        if info.stopped:  # a `stop` that was killed before it ended the process
            there.kill()
        elif settings.take_over and not info.settings.take_over:
            there.stop()
        else:
            _check_same_settings(attachment, info, settings)
            return there
        _await_end(attachment, settings.watch)
    # A local Ray uses our interpreter, and so our code.
    code: contextlib.AbstractContextManager[Mapping[str, Any]] = (
        contextlib.nullcontext({})
        if attachment.local
        else missing_code(ray, settings.watch, wheel_path)
    )
    with code as runtime_env:
        if runtime_env:
            if not attachment.own:
                raise CoordinationError(
                    "this Ray lacks our smdist and takes code only from a new driver. "
                    "Run `smdist coordinator start` in a process of its own."
                )
            ray.shutdown()
            _connect(ray, attachment.address, runtime_env)
        handle = (
            ray.remote(Coordinator)
            .options(
                name=actor_name(settings.watch),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                max_task_retries=-1,
                num_cpus=0,
            )
            .remote(msgspec.json.encode(settings))
        )
        client = CoordinatorClient(ray, handle, actor_name(settings.watch))
        # Another driver may have started one meanwhile.
        _check_same_settings(attachment, client.info(timeout_s=_START_S), settings)
    return client


def _await_end(attachment: Attachment, watch: str) -> None:
    """Wait until Ray has released the name of an actor that was ended."""
    deadline = time.monotonic() + _START_S
    while find(attachment, watch) is not None:
        if time.monotonic() > deadline:
            raise CoordinationError(f"{actor_name(watch)} does not end")
        time.sleep(0.05)


def _check_same_settings(attachment: Attachment, info: CoordinatorInfo, settings: Settings) -> None:
    there = info.settings
    if msgspec.structs.replace(there, take_over=settings.take_over) != settings:
        raise CoordinationError(
            f"{info.name} already watches {there.watch} with other settings "
            f"({_differences(there, settings)}). Stop it first: "
            f"smdist coordinator stop{address_option(attachment)} --watch {shlex.quote(there.watch)}"
        )


def address_option(attachment: Attachment) -> str:
    """Return the option by which a command reaches the same Ray."""
    return "" if attachment.local else f" --address {shlex.quote(attachment.address)}"


def _differences(old: Settings, new: Settings) -> str:
    before, after = msgspec.structs.asdict(old), msgspec.structs.asdict(new)
    return ", ".join(f"{k}={v!r}" for k, v in before.items() if v != after[k])


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigurationError(
            "a coordinator needs Ray, which is not installed. Run: pip install 'smdist[ray]'"
        ) from error


def _check_address(address: str) -> None:
    """Raise at once what Ray would report after a minute."""
    if address.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{address} is a job server. Use: ray job submit --address {address} -- "
            "smdist coordinator start --address auto --watch URL"
        )
    place = address.removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(
            f"{address!r} is no address of a Ray. Use local, auto, host:port or ray://host:10001."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except OSError as error:
        raise CoordinationError(
            f"no Ray answers at {address}: {error}. Check that it runs and that no firewall blocks it."
        ) from error
