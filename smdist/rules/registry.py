"""Rules by name: the class name or its snake case, in any capitals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smdist.errors import UnknownKey
from smdist.rules import builtin
from smdist.rules.across_ranks import ACROSS_RANKS
from smdist.rules.parameters import make_rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smdist.rules.builtin import BuiltInRule
    from smdist.rules.judge import EvidenceRule

__all__ = ["RULES", "build", "default_rules", "rule_class"]

RULES: Mapping[str, type[BuiltInRule]] = {
    name: getattr(builtin, name) for name in builtin.__all__ if name != "BuiltInRule"
}
"""All built-in rules by their class names."""

_PLAIN: Mapping[str, type[EvidenceRule]] = {
    **{name.lower(): rule for name, rule in RULES.items()},
    **{rule.__name__.lower(): rule for rule in ACROSS_RANKS},
}

# These need a selection, another run, or names that only some models have; the report is no check.
_NOT_BY_DEFAULT = frozenset(
    [
        "AllZero",
        "CheckInputImages",
        "CreateXgboostReport",
        "NLPSequenceRatio",
        "SimilarAcrossRuns",
        "TensorVariance",
        "UnchangedTensor",
    ]
)


def rule_class(name: str) -> type[EvidenceRule]:
    """Return the rule of this name. Raises UnknownKey with the nearest known one."""
    found = _PLAIN.get(name.replace("_", "").strip().lower())
    if found is None:
        known = (*RULES, *(rule.__name__ for rule in ACROSS_RANKS))
        raise UnknownKey(name, known, "the names of rules")
    return found


def build(name: str, parameters: Mapping[str, Any] | None = None) -> EvidenceRule:
    """Return a rule with parameters, which may be texts. Raises ConfigurationError."""
    return make_rule(rule_class(name), parameters or {})


def default_rules() -> tuple[BuiltInRule, ...]:
    """Return the rules that make sense without parameters, with their defaults."""
    return tuple(rule() for name, rule in RULES.items() if name not in _NOT_BY_DEFAULT)
