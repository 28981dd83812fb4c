"""slime: reinforcement-learning post-training of language models, extended by plugins.

The public API, loaded lazily (PEP 562): importing `slime_core` loads neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.buffer import BufferBase
    from slime_core.engines.model_urls import get_model_url, planned_models
    from slime_core.errors import SlimeError
    from slime_core.estimator import EstimatorBase, GroupEstimator
    from slime_core.learning.corrections import CorrectionInputs, CorrectionOutputs
    from slime_core.plugins.adapters import RewardCaller
    from slime_core.plugins.boxed import last_boxed
    from slime_core.plugins.hookspecs import hookimpl
    from slime_core.plugins.json_client import JsonClient
    from slime_core.plugins.options import PluginOptions, options
    from slime_core.plugins.resolve import resolve
    from slime_core.protocols import (
        AdvantageInputs,
        Advantages,
        GenerateContext,
        LossInputs,
        LossOutputs,
        RewardInputs,
    )
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
    "BufferBase": "slime_core.buffer",
    "CorrectionInputs": "slime_core.learning.corrections",
    "CorrectionOutputs": "slime_core.learning.corrections",
    "DynamicFilterOutput": "slime_core.types",
    "EstimatorBase": "slime_core.estimator",
    "FilterDecision": "slime_core.types",
    "GenerateContext": "slime_core.protocols",
    "GenerationOutput": "slime_core.types",
    "Group": "slime_core.types",
    "GroupEstimator": "slime_core.estimator",
    "JsonClient": "slime_core.plugins.json_client",
    "LossInputs": "slime_core.protocols",
    "LossOutputs": "slime_core.protocols",
    "PluginOptions": "slime_core.plugins.options",
    "RewardCaller": "slime_core.plugins.adapters",
    "RewardInputs": "slime_core.protocols",
    "RolloutFnEvalOutput": "slime_core.types",
    "RolloutFnTrainOutput": "slime_core.types",
    "Sample": "slime_core.types",
    "SampleStatus": "slime_core.types",
    "SlimeError": "slime_core.errors",
    "TrainBatch": "slime_core.types",
    "get_model_url": "slime_core.engines.model_urls",
    "hookimpl": "slime_core.plugins.hookspecs",
    "last_boxed": "slime_core.plugins.boxed",
    "options": "slime_core.plugins.options",
    "planned_models": "slime_core.engines.model_urls",
    "resolve": "slime_core.plugins.resolve",
}

__all__ = [
    "AdvantageInputs",
    "Advantages",
    "BufferBase",
    "CorrectionInputs",
    "CorrectionOutputs",
    "DynamicFilterOutput",
    "EstimatorBase",
    "FilterDecision",
    "GenerateContext",
    "GenerationOutput",
    "Group",
    "GroupEstimator",
    "JsonClient",
    "LossInputs",
    "LossOutputs",
    "PluginOptions",
    "RewardCaller",
    "RewardInputs",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "SampleStatus",
    "SlimeError",
    "TrainBatch",
    "__version__",
    "get_model_url",
    "hookimpl",
    "last_boxed",
    "options",
    "planned_models",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'slime_core' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
