"""Nothing is captured: how far from 1 the ratio of equal things comes out."""

from __future__ import annotations

from benchmarks.peers.base import Base

ENVIRONMENT = "main"
Peer = Base
