"""What this TensorFlow does not have is not collected."""

from __future__ import annotations

import tensorflow as tf

collect_ignore = (
    [] if hasattr(tf, "estimator") else ["test_estimator_hook.py", "test_keras_autotuned.py"]
)
