"""`smdist check`: what the rules find in a run, for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from smdist.cli.console import complain
from smdist.errors import SmdistError
from smdist.messages import printable
from smdist.rules import Verdict, check
from smdist.rules.finding_lines import lines_of
from smdist.trials import create_trial

__all__ = ["run"]

NOTHING_FOUND, FOUND, NOT_READ = 0, 1, 2


def run(path: str, rules: Sequence[str] | None, *, as_json: bool) -> int:
    """Print what the rules find; return the exit code."""
    try:
        with create_trial(path) as trial:
            findings = check(trial, rules)
            troubles = trial.troubles().get("", [])  # objects that could not be read
    except (SmdistError, OSError) as error:
        complain(error)
        return NOT_READ
    for text in troubles:
        complain(f"left out: {text}")
    if as_json:
        print(json.dumps([finding.to_dict() for finding in findings], indent=2))
    else:
        print("\n".join(map(printable, lines_of(findings))))
    return FOUND if any(one.verdict is Verdict.FIRES for one in findings) else NOTHING_FOUND
