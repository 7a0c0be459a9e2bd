"""Blocks of many ranks and steps as arrays, and the files that hold them. Pure."""

from __future__ import annotations
