"""Errors under the name that scripts written for smdebug import them by; see `smdist.errors`."""

from __future__ import annotations

from smdist.errors import (
    ConfigurationError,
    InvalidCollectionConfiguration,
    InvalidWorker,
    NoConfigurationFile,
    NoMoreData,
    NoSuchRun,
    RuleEvaluationConditionMet,
    RunExists,
    ShapeUnavailableForStep,
    SmdistError,
    StepNotYetAvailable,
    StepUnavailable,
    StoreError,
    TensorUnavailable,
    TensorUnavailableForStep,
    TrialError,
    UnknownKey,
    WaitTimeout,
)

__all__ = [
    "ConfigurationError",
    "IndexReaderException",
    "InsufficientInformationForRuleInvocation",
    "InvalidCollectionConfiguration",
    "InvalidWorker",
    "MissingCollectionFiles",
    "NoConfigurationFile",
    "NoMoreData",
    "NoSuchRun",
    "RuleEvaluationConditionMet",
    "RunExists",
    "SMDebugCustomerError",
    "SMDebugError",
    "SMDebugNotImplementedError",
    "SMDebugRuntimeError",
    "SMDebugTypeError",
    "SMDebugValueError",
    "ShapeUnavailableForStep",
    "SmdistError",
    "StepNotYetAvailable",
    "StepUnavailable",
    "StoreError",
    "TensorUnavailable",
    "TensorUnavailableForStep",
    "TrialError",
    "UnknownKey",
    "WaitTimeout",
]

SMDebugError = SmdistError
SMDebugCustomerError = SmdistError
SMDebugRuntimeError = SmdistError
SMDebugTypeError = ConfigurationError
SMDebugValueError = ConfigurationError
IndexReaderException = StoreError
MissingCollectionFiles = NoSuchRun


class SMDebugNotImplementedError(SmdistError, NotImplementedError):
    """For scripts to raise; smdist itself does not."""


class InsufficientInformationForRuleInvocation(TrialError):
    """For rules to raise; smdist itself does not."""

    def __init__(self, rule_name: str, message: str) -> None:
        self.rule_name, self.message = rule_name, message
        super().__init__(rule_name, message)

    def __str__(self) -> str:
        return f"rule {self.rule_name} cannot be judged: {self.message}"
