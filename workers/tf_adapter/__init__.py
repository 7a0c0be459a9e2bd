"""Capture from TensorFlow: what Keras, tapes, sessions and estimators have in common."""

from __future__ import annotations
