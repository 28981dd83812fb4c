"""slime: reinforcement-learning post-training of language models, extended by plugins.

The public API, loaded lazily (PEP 562): importing `slime_core` loads neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.errors import SlimeError
    from slime_core.estimator import EstimatorBase
    from slime_core.plugins.hookspecs import hookimpl
    from slime_core.protocols import AdvantageInputs, Advantages, GenerateContext, LossInputs, LossOutputs
    from slime_core.types import (
        DynamicFilterOutput,
        FilterDecision,
        GenerationOutput,
        Group,
        RolloutFnEvalOutput,
        RolloutFnTrainOutput,
        Sample,
        SampleStatus,
        TrainBatch,
    )

__version__ = "0.1.0"

_EXPORTS = {
    "AdvantageInputs": "slime_core.protocols",
    "Advantages": "slime_core.protocols",
    "DynamicFilterOutput": "slime_core.types",
    "EstimatorBase": "slime_core.estimator",
    "FilterDecision": "slime_core.types",
    "GenerateContext": "slime_core.protocols",
    "GenerationOutput": "slime_core.types",
    "Group": "slime_core.types",
    "LossInputs": "slime_core.protocols",
    "LossOutputs": "slime_core.protocols",
    "RolloutFnEvalOutput": "slime_core.types",
    "RolloutFnTrainOutput": "slime_core.types",
    "Sample": "slime_core.types",
    "SampleStatus": "slime_core.types",
    "SlimeError": "slime_core.errors",
    "TrainBatch": "slime_core.types",
    "hookimpl": "slime_core.plugins.hookspecs",
}

__all__ = [
    "AdvantageInputs",
    "Advantages",
    "DynamicFilterOutput",
    "EstimatorBase",
    "FilterDecision",
    "GenerateContext",
    "GenerationOutput",
    "Group",
    "LossInputs",
    "LossOutputs",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "SampleStatus",
    "SlimeError",
    "TrainBatch",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'slime_core' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
