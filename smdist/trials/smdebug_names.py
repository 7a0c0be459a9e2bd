"""Functions that open a trial under the names and with the arguments of smdebug."""

from __future__ import annotations

import os
from typing import Any

from smdist.trials.open import create_trial
from smdist.trials.trial import Trial

__all__ = ["LocalTrial", "S3Trial"]


def LocalTrial(name: str, dirname: str | os.PathLike[str], **options: Any) -> Trial:
    """Call `create_trial` for a directory."""
    return create_trial(dirname, name, **options)


def S3Trial(name: str, bucket_name: str, prefix_name: str, **options: Any) -> Trial:
    """Call `create_trial` for a prefix of a bucket."""
    return create_trial(f"s3://{bucket_name}/{prefix_name.strip('/')}", name, **options)
