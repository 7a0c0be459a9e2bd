"""From an address to a running coordinator: attach to Ray, bring the code there, start the actor.

    with attach("local") as ray:           # starts a Ray of this user if none runs
        client = start(ray, Settings(watch="s3://bucket/jobs"))
        client.status()

`local` is a Ray of this user on this machine, which stays when the caller ends; `auto` the cluster
that this machine is a node of; `host:port` the same by address; `ray://host:10001` one that this
machine is no node of. Within a job that Ray itself has started, `auto` is the right one.

Synchronous, for command lines and drivers; one attachment per process at a time, as in Ray.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shlex
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import msgspec

from smdist.coordination.ray_actor import code_package as wheel
from smdist.coordination.ray_actor import local_head as local_ray
from smdist.coordination.ray_actor import tokens as ray_tokens
from smdist.coordination.ray_actor.client import CoordinatorClient
from smdist.coordination.ray_actor.coordinator import (
    NAMESPACE,
    Coordinator,
    CoordinatorInfo,
    Settings,
    actor_name,
    check_watch_url,
)
from smdist.errors import ConfigurationError, CoordinationError

__all__ = ["Attachment", "address_option", "attach", "check_wheel", "coordinators", "find", "start"]

# What a node needs besides smdist to run a coordinator, and aiobotocore for s3://.
_NEEDED = ("numpy", "safetensors", "ml_dtypes", "msgspec", "google_crc32c")
_PROBE_S, _START_S = 120.0, 120.0


class Attachment(msgspec.Struct, frozen=True):
    """A driver's connection to a Ray."""

    ray: Any  # the module, connected
    address: str
    local: bool  # one of this user that `smdist` has started
    own: bool = True  # the connection was made for this


@contextlib.contextmanager
def attach(address: str = "local", *, start_local: bool = True) -> Iterator[Attachment]:
    """Be a driver of the Ray at `address`. CoordinationError says what is not there.

    `start_local` false: a `local` Ray has to run already. In a process that is a driver already,
    `auto` is the Ray of that, and stays connected.
    """
    if address == "local":
        with _attached_here(start_local) as attachment:
            yield attachment
        return
    if address != "auto":
        _check(address)
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
def _attached_here(start_local: bool) -> Iterator[Attachment]:
    """To the local Ray. A new one on which nothing was started is ended when the block fails."""
    os.environ.update(local_ray.LOOPBACK)  # before ray is imported: it reads this once
    ray = _import_ray()
    _check_unattached(ray)
    _check_loopback()
    here, new = local_ray.start() if start_local else (local_ray.find(), False)
    if here is None:
        raise CoordinationError(
            "no coordinator runs on this machine: smdist coordinator start --watch URL"
        )
    attachment, stays = Attachment(ray, here.address, local=True), not new
    try:
        with ray_tokens.used(here.token):
            _connect(ray, here.address, {}, local=True)
        try:
            yield attachment
            stays = True
        finally:
            with contextlib.suppress(Exception):  # it does not answer: nothing can be on it
                stays = stays or bool(coordinators(attachment))
            ray.shutdown()
    finally:
        ray_tokens.forget()
        if not stays:
            local_ray.stop()


def _check_unattached(ray: Any) -> None:
    if ray.is_initialized():
        raise CoordinationError(
            "this process is connected to a Ray already, and can be to one at a time: use that "
            "(address auto), or call ray.shutdown() first, or use another process"
        )


def _check_loopback() -> None:
    """A Ray that was imported before would look for the local one elsewhere, for minutes."""
    constants = importlib.import_module("ray._private.ray_constants")
    if getattr(constants, "ENABLE_RAY_CLUSTER", False):
        (name, value), *_ = local_ray.LOOPBACK.items()
        raise CoordinationError(
            f"ray was imported without {name}={value}, and looks for no Ray of this machine alone: "
            "set that before the import, or use another process"
        )


def _connect(
    ray: Any, address: str, runtime_env: Mapping[str, Any], *, local: bool = False
) -> None:
    # Ray puts a handler of its own in the place of the caller's.
    before = signal.getsignal(signal.SIGTERM) if _in_main_thread() else None
    try:
        if address != "auto":
            ray_tokens.check(ray, address)
        ray.init(
            address=address,
            namespace=NAMESPACE,
            runtime_env=dict(runtime_env) or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        if ray_tokens.is_refusal(error):
            raise ray_tokens.refusal(address, local) from error
        raise CoordinationError(f"no Ray at {address}: {error}") from error
    finally:
        if before not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _cluster_here() -> str:
    """The cluster that this machine is a node of, or `auto`: then Ray is to say.

    It would also take one that listens on the loopback interface alone, which a driver that expects
    a cluster looks for elsewhere, for minutes.
    """
    if os.environ.get("RAY_ADDRESS", "auto") not in ("", "auto") or local_ray.looks_for_loopback():
        return "auto"
    try:
        services = importlib.import_module("ray._private.services")
        found = {str(address) for address in services.find_gcs_addresses()}
    except (ImportError, AttributeError):
        return "auto"
    chosen = _which(found)
    if chosen != "auto":  # for that, Ray does so itself
        ray_tokens.use_any()
    return chosen


def _which(found: Collection[str]) -> str:
    """Of the addresses of all that run here."""
    reachable = sorted(one for one in found if not one.startswith(("127.", "localhost", "[::1]")))
    if found and not reachable:
        raise CoordinationError(
            "this machine is no node of a cluster; the only Ray on it is for this machine alone, "
            "as smdist starts one: leave --address out to use that"
        )
    return reachable[0] if len(reachable) == 1 < len(found) else "auto"


def find(attachment: Attachment, watch: str) -> CoordinatorClient | None:
    """The coordinator of that place, or None."""
    try:
        handle = attachment.ray.get_actor(actor_name(watch), namespace=NAMESPACE)
    except ValueError:
        return None
    return CoordinatorClient(attachment.ray, handle, actor_name(watch))


def coordinators(attachment: Attachment) -> list[CoordinatorClient]:
    """Every coordinator on that Ray, also those whose place nobody remembers."""
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
    """The coordinator with these settings, new or already there.

    CoordinationError when one with other settings watches the same place. Where the cluster needs
    our code, this connects anew: Ray takes files from a driver only then.
    """
    ray = attachment.ray
    settings = msgspec.structs.replace(settings, watch=check_watch_url(settings.watch))
    if wheel_path is not None:
        check_wheel(wheel_path)
    there = find(attachment, settings.watch)
    if there is not None:
        where = there.info()
        if where.stopped:  # whoever stopped it did not live to end its process
            there.kill()
        elif settings.take_over and not where.settings.take_over:
            there.stop()
        else:
            _check_same(attachment, where, settings)
            return there
        _await_end(attachment, settings.watch)
    with _runtime_env(attachment, settings, wheel_path) as runtime_env:
        if runtime_env:
            if not attachment.own:
                raise CoordinationError(
                    "this Ray runs another smdist, or none, and takes ours only from a new driver: "
                    "run `smdist coordinator start` in a process of its own"
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
        # Somebody else may have been first.
        _check_same(attachment, client.info(timeout_s=_START_S), settings)
    return client


def _await_end(attachment: Attachment, watch: str) -> None:
    """Ray keeps the name of an actor for a moment after it was ended."""
    deadline = time.monotonic() + _START_S
    while find(attachment, watch) is not None:
        if time.monotonic() > deadline:
            raise CoordinationError(f"{actor_name(watch)} does not end")
        time.sleep(0.05)


def _check_same(attachment: Attachment, where: CoordinatorInfo, settings: Settings) -> None:
    if msgspec.structs.replace(where.settings, take_over=settings.take_over) != settings:
        raise CoordinationError(
            f"{where.name} already watches {where.settings.watch} with other settings "
            f"({_differences(where.settings, settings)}); stop it first: "
            f"smdist coordinator stop{address_option(attachment)} --watch {shlex.quote(where.settings.watch)}"
        )


def address_option(attachment: Attachment) -> str:
    """How a command reaches the same Ray."""
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
            "a coordinator needs Ray, which is not installed: pip install 'smdist[ray]'"
        ) from error


def _check(address: str) -> None:
    """Say at once what Ray would say after a minute."""
    if address.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{address} takes jobs: ray job submit --address {address} -- "
            "smdist coordinator start --address auto --watch URL"
        )
    place = address.removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(
            f"{address!r} is no address of a Ray: use local, auto, host:port or ray://host:10001"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except OSError as error:
        raise CoordinationError(
            f"no Ray answers at {address}: {error}; is it up, and does a firewall let us through?"
        ) from error


# -- code for the cluster ------------------------------------------------------------------------


@contextlib.contextmanager
def _runtime_env(
    attachment: Attachment, settings: Settings, wheel_path: Path | None
) -> Iterator[Mapping[str, Any]]:
    """Nothing where the cluster runs what we run; else our wheel, and what it lacks besides.

    The wheel is unpacked here and travels as a folder. Given the file, Ray would have each node's
    pip fetch its dependencies again and put them before the cluster's own.
    """
    if attachment.local:
        yield {}  # our interpreter
        return
    needed = (*_NEEDED, *(("aiobotocore",) if settings.watch.startswith("s3://") else ()))
    there, missing = _probe(attachment.ray, needed)
    if there == wheel.digest() and not missing and wheel_path is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="smdist-wheel-") as folder:
        packed = wheel_path or wheel.pack(Path(folder))
        with ZipFile(packed) as archive:
            archive.extractall(Path(folder) / "unpacked")
        runtime_env: dict[str, Any] = {
            "py_modules": [str(Path(folder) / "unpacked" / "smdist")],
            "config": {"setup_timeout_seconds": 600},
        }
        if missing:
            runtime_env["pip"] = [text for text in wheel.requirements() if _module(text) in missing]
        yield runtime_env


def check_wheel(path: Path) -> None:
    """ConfigurationError when there is no smdist in it."""
    try:
        with ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, BadZipFile) as error:
        raise ConfigurationError(f"--wheel {path} is no wheel: {error}") from error
    if "smdist/__init__.py" not in names:
        raise ConfigurationError(f"--wheel {path} is no wheel of smdist")


def _module(requirement: str) -> str:
    name = requirement
    for mark in "[<>=!~ ":
        name = name.partition(mark)[0]
    return name.replace("-", "_")


def _probe(ray: Any, modules: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Which smdist a worker of the cluster has, "" for none, and which modules it has not."""

    def look() -> tuple[str, tuple[str, ...]]:  # nested: travels as code, not as a name
        from importlib.util import find_spec

        missing = tuple(name for name in modules if find_spec(name) is None)
        try:
            from smdist.coordination.ray_actor import code_package as wheel

            return wheel.digest(), missing
        except ImportError:
            return "", missing

    try:
        found: tuple[str, tuple[str, ...]] = ray.get(
            ray.remote(num_cpus=0, max_retries=3)(look).remote(), timeout=_PROBE_S
        )
    except ray.exceptions.GetTimeoutError as error:
        raise CoordinationError(
            f"the cluster has started no process within {_PROBE_S:g} s: ray status"
        ) from error
    except ray.exceptions.RayError as error:
        raise CoordinationError(f"the cluster cannot start a process: {error}") from error
    return found
