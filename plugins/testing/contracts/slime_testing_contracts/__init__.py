"""The contract suite of each of slime's kinds: what every component of a kind must do, as test classes.

Subclass a suite in a test file, name the component, add examples; pytest runs it::

    from slime_testing_contracts import RewardContract

    class TestMath(RewardContract):
        component = "math"
        examples = [("1+1=", r"\\boxed{2}", "2", 1.0), ("1+1=", r"\\boxed{3}", "2", 0.0)]

slime's own plugins are held to the same suites, which `slime plugins check` finds by entry point (`slime.contracts`).
Needs pytest. Loaded lazily (PEP 562): what happens here is that the suites' asserts are rewritten, so that a failure
shows values.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from slime_testing_contracts.buffer import BufferContract
    from slime_testing_contracts.correction import CorrectionContract, LossReducerContract
    from slime_testing_contracts.data_source import DataSourceContract
    from slime_testing_contracts.engine import EngineContract
    from slime_testing_contracts.environment import EnvironmentContract
    from slime_testing_contracts.estimator import AdvantageContract, EstimatorContract
    from slime_testing_contracts.filter import FilterContract
    from slime_testing_contracts.generator import GeneratorContract
    from slime_testing_contracts.hook_plugin import HookPluginContract
    from slime_testing_contracts.loss import CustomLossContract, LossContract
    from slime_testing_contracts.megatron_hooks import (
        MegatronBeforeLogProbContract,
        MegatronBeforeTrainStepContract,
        MegatronInitContract,
        MegatronModelProviderContract,
    )
    from slime_testing_contracts.megatron_model import MegatronModelContract
    from slime_testing_contracts.model import ModelContract
    from slime_testing_contracts.recipe import RecipeContract
    from slime_testing_contracts.reward import RewardContract
    from slime_testing_contracts.rollout import RolloutContract
    from slime_testing_contracts.rollout_hooks import (
        AllSamplesProcessContract,
        EvalLogContract,
        RolloutLogContract,
        SampleFilterContract,
        SampleHookContract,
    )
    from slime_testing_contracts.service import Asked, ScriptedService
    from slime_testing_contracts.tools import ToolContract, ToolParserContract
    from slime_testing_contracts.train_data import (
        DataPostprocessContract,
        RewardPostProcessContract,
        SampleConverterContract,
    )
    from slime_testing_contracts.trainer import TrainerContract
    from slime_testing_contracts.weight_post_write import WeightPostWriteContract

_EXPORTS = {
    "AdvantageContract": "estimator",
    "AllSamplesProcessContract": "rollout_hooks",
    "Asked": "service",
    "BufferContract": "buffer",
    "CorrectionContract": "correction",
    "CustomLossContract": "loss",
    "DataPostprocessContract": "train_data",
    "DataSourceContract": "data_source",
    "EngineContract": "engine",
    "EnvironmentContract": "environment",
    "EstimatorContract": "estimator",
    "EvalLogContract": "rollout_hooks",
    "FilterContract": "filter",
    "GeneratorContract": "generator",
    "HookPluginContract": "hook_plugin",
    "LossContract": "loss",
    "LossReducerContract": "correction",
    "MegatronBeforeLogProbContract": "megatron_hooks",
    "MegatronBeforeTrainStepContract": "megatron_hooks",
    "MegatronInitContract": "megatron_hooks",
    "MegatronModelContract": "megatron_model",
    "MegatronModelProviderContract": "megatron_hooks",
    "ModelContract": "model",
    "RecipeContract": "recipe",
    "RewardContract": "reward",
    "RewardPostProcessContract": "train_data",
    "RolloutContract": "rollout",
    "RolloutLogContract": "rollout_hooks",
    "SampleConverterContract": "train_data",
    "SampleFilterContract": "rollout_hooks",
    "SampleHookContract": "rollout_hooks",
    "ScriptedService": "service",
    "ToolContract": "tools",
    "ToolParserContract": "tools",
    "TrainerContract": "trainer",
    "WeightPostWriteContract": "weight_post_write",
}
"""Name -> module."""

__all__ = [
    "AdvantageContract",
    "AllSamplesProcessContract",
    "Asked",
    "BufferContract",
    "CorrectionContract",
    "CustomLossContract",
    "DataPostprocessContract",
    "DataSourceContract",
    "EngineContract",
    "EnvironmentContract",
    "EstimatorContract",
    "EvalLogContract",
    "FilterContract",
    "GeneratorContract",
    "HookPluginContract",
    "LossContract",
    "LossReducerContract",
    "MegatronBeforeLogProbContract",
    "MegatronBeforeTrainStepContract",
    "MegatronInitContract",
    "MegatronModelContract",
    "MegatronModelProviderContract",
    "ModelContract",
    "RecipeContract",
    "RewardContract",
    "RewardPostProcessContract",
    "RolloutContract",
    "RolloutLogContract",
    "SampleConverterContract",
    "SampleFilterContract",
    "SampleHookContract",
    "ScriptedService",
    "ToolContract",
    "ToolParserContract",
    "TrainerContract",
    "WeightPostWriteContract",
]

pytest.register_assert_rewrite(*(f"{__name__}.{found.name}" for found in pkgutil.iter_modules(__path__)))


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
