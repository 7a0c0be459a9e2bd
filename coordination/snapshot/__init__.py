"""A merged view as stored objects: `pack` writes what `load` reads, `head` describes it."""

from __future__ import annotations
