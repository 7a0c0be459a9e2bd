"""Capture from Keras 2 and 3: `fit`, `evaluate`, `predict`, and loops with a GradientTape."""

from __future__ import annotations
