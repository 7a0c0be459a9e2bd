"""Capture from TensorFlow: the common part of Keras, tapes, sessions and estimators."""

from __future__ import annotations
