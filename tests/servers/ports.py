"""Ports of loopback for servers that cannot choose one themselves."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]

# StoreSubtree those that the kernel gives to whoever asks for any, above those of Ray's workers and of its
# servers for clients: until the server has it, nobody else is likely to take it.
_RANGE = range(25_000, 32_000)


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(_RANGE)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
