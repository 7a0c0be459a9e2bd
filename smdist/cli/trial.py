"""`smdist trial`: a run in a few lines."""

from __future__ import annotations

from smdist.cli.console import complain
from smdist.errors import SmdistError
from smdist.trials import create_trial

__all__ = ["run"]


def run(path: str) -> int:
    try:
        with create_trial(path) as trial:
            print(trial.describe())
    except SmdistError as error:
        complain(error)
        return 1
    return 0
