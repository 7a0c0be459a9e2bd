"""The errors of `smdist.errors` under the names of smdebug, for scripts written for it."""

from __future__ import annotations

from smdist import errors
from smdist.errors import *
from smdist.errors import ConfigurationError, NoSuchRun, SmdistError, StoreError, TrialError

__all__ = [
    "IndexReaderException",
    "InsufficientInformationForRuleInvocation",
    "MissingCollectionFiles",
    "SMDebugCustomerError",
    "SMDebugError",
    "SMDebugNotImplementedError",
    "SMDebugRuntimeError",
    "SMDebugTypeError",
    "SMDebugValueError",
]
__all__ += errors.__all__

SMDebugError = SmdistError
SMDebugCustomerError = SmdistError
SMDebugRuntimeError = SmdistError
SMDebugTypeError = ConfigurationError
SMDebugValueError = ConfigurationError
IndexReaderException = StoreError
MissingCollectionFiles = NoSuchRun


class SMDebugNotImplementedError(SmdistError, NotImplementedError):
    """For scripts to raise; smdist does not raise it."""


class InsufficientInformationForRuleInvocation(TrialError):
    """For rules to raise; smdist does not raise it."""

    def __init__(self, rule_name: str, message: str) -> None:
        self.rule_name, self.message = rule_name, message
        super().__init__(rule_name, message)

    def __str__(self) -> str:
        return f"rule {self.rule_name} cannot be evaluated: {self.message}"
