"""Capture from PyTorch: hooks on modules, parameters, gradients, losses and optimizers."""

from __future__ import annotations
