"""A driver of a Ray: reads orders from its input, line by line, and answers each with one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from smdist.coordination.ray_actor import launcher
from smdist.coordination.ray_actor.client import CoordinatorClient
from smdist.coordination.ray_actor.coordinator import Settings
from smdist.coordination.ray_actor.launcher import Attachment
from smdist.identity import ModeKeys

Order = dict[str, Any]
ANSWERS = os.fdopen(os.dup(1), "w")


def client(ray: Attachment, order: Order) -> CoordinatorClient:
    found = launcher.find(ray, order["watch"])
    assert found is not None, f"no coordinator for {order['watch']}"
    return found


def start(ray: Attachment, order: Order) -> object:
    settings = msgspec.convert(order["settings"], Settings)
    wheel = Path(order["wheel"]) if "wheel" in order else None
    return msgspec.to_builtins(launcher.start(ray, settings, wheel_path=wheel).info())


def ask(ray: Attachment, order: Order) -> object:
    arguments = {**order.get("arguments", {})}
    if "mode" in arguments:
        arguments["mode"] = ModeKeys[arguments["mode"]]
    found = getattr(client(ray, order), order["method"])(**arguments)
    return msgspec.to_builtins(found, str_keys=True)


def nodes(ray: Attachment, order: Order) -> object:
    return [
        {"id": node["NodeID"], "alive": node["Alive"], "resources": node["Resources"]}
        for node in ray.ray.nodes()
    ]


def names(ray: Attachment, order: Order) -> object:
    return [one.name for one in launcher.coordinators(ray)]


ORDERS: dict[str, Callable[[Attachment, Order], object]] = {
    "start": start,
    "ask": ask,
    "nodes": nodes,
    "names": names,
}


def say(**answer: object) -> None:
    ANSWERS.write(json.dumps(answer) + "\n")
    ANSWERS.flush()


def main() -> None:
    os.dup2(2, 1)  # Ray says things there too
    with launcher.attach(sys.argv[1]) as ray:
        say(value=ray.address)
        for line in sys.stdin:
            order = json.loads(line)
            try:
                say(value=ORDERS[order["what"]](ray, order))
            except Exception as error:  # noqa: BLE001 - told to who gave the order
                say(error=type(error).__name__, message=str(error))


if __name__ == "__main__":
    main()
