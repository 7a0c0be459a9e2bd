"""The service as a Ray actor: the actor, its client, how it is started, a local Ray."""

from __future__ import annotations
