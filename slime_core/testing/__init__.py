"""The test kit for plugin authors: a contract suite per kind, an engine that follows a script, and a whole run.

Subclass a contract in a test file, name the component, add examples; pytest runs the suite::

    from slime_core.testing import RewardContract

    class TestMath(RewardContract):
        component = "math"
        examples = [("1+1=", r"\\boxed{2}", "2", 1.0), ("1+1=", r"\\boxed{3}", "2", 0.0)]

slime's own plugins are held to the same suites. Needs pytest. Loaded lazily (PEP 562): pytest imports this package in
every run of an environment that has slime, for the fixtures and options of `pytest_plugin`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.engines.scripted import CharTokenizer, Reply, Request, ScriptedEngine
    from slime_core.testing.contracts.base import Contract
    from slime_core.testing.contracts.buffer import BufferContract
    from slime_core.testing.contracts.correction import CorrectionContract, LossReducerContract
    from slime_core.testing.contracts.data_source import DataSourceContract
    from slime_core.testing.contracts.engine import EngineContract
    from slime_core.testing.contracts.environment import EnvironmentContract
    from slime_core.testing.contracts.estimator import AdvantageContract, EstimatorContract
    from slime_core.testing.contracts.filter import FilterContract
    from slime_core.testing.contracts.generator import GeneratorContract
    from slime_core.testing.contracts.hook_plugin import HookPluginContract
    from slime_core.testing.contracts.loss import CustomLossContract, LossContract
    from slime_core.testing.contracts.megatron_hooks import (
        MegatronBeforeLogProbContract,
        MegatronBeforeTrainStepContract,
        MegatronInitContract,
        MegatronModelProviderContract,
    )
    from slime_core.testing.contracts.megatron_model import MegatronModelContract
    from slime_core.testing.contracts.model import ModelContract
    from slime_core.testing.contracts.recipe import RecipeContract
    from slime_core.testing.contracts.reward import RewardContract
    from slime_core.testing.contracts.rollout import RolloutContract
    from slime_core.testing.contracts.rollout_hooks import (
        AllSamplesProcessContract,
        EvalLogContract,
        RolloutLogContract,
        SampleFilterContract,
        SampleHookContract,
    )
    from slime_core.testing.contracts.tools import ToolContract, ToolParserContract
    from slime_core.testing.contracts.train_data import (
        DataPostprocessContract,
        RewardPostProcessContract,
        SampleConverterContract,
    )
    from slime_core.testing.contracts.trainer import TrainerContract
    from slime_core.testing.contracts.weight_post_write import WeightPostWriteContract
    from slime_core.testing.contracts.weight_transport import WeightTransportContract
    from slime_core.testing.loop import LoopRun
    from slime_core.testing.service import Asked, ScriptedService

_SUITES = {
    "advantages": ("AdvantageContract", "estimator"),
    "all_samples_processes": ("AllSamplesProcessContract", "rollout_hooks"),
    "buffers": ("BufferContract", "buffer"),
    "corrections": ("CorrectionContract", "correction"),
    "custom_losses": ("CustomLossContract", "loss"),
    "data_postprocesses": ("DataPostprocessContract", "train_data"),
    "data_sources": ("DataSourceContract", "data_source"),
    "engines": ("EngineContract", "engine"),
    "environments": ("EnvironmentContract", "environment"),
    "estimators": ("EstimatorContract", "estimator"),
    "eval_logs": ("EvalLogContract", "rollout_hooks"),
    "filters": ("FilterContract", "filter"),
    "generators": ("GeneratorContract", "generator"),
    "loss_reducers": ("LossReducerContract", "correction"),
    "losses": ("LossContract", "loss"),
    "megatron_before_log_probs": ("MegatronBeforeLogProbContract", "megatron_hooks"),
    "megatron_before_train_steps": ("MegatronBeforeTrainStepContract", "megatron_hooks"),
    "megatron_inits": ("MegatronInitContract", "megatron_hooks"),
    "megatron_model_providers": ("MegatronModelProviderContract", "megatron_hooks"),
    "megatron_models": ("MegatronModelContract", "megatron_model"),
    "models": ("ModelContract", "model"),
    "recipes": ("RecipeContract", "recipe"),
    "reward_post_processes": ("RewardPostProcessContract", "train_data"),
    "rewards": ("RewardContract", "reward"),
    "rollout_logs": ("RolloutLogContract", "rollout_hooks"),
    "rollouts": ("RolloutContract", "rollout"),
    "sample_converters": ("SampleConverterContract", "train_data"),
    "sample_filters": ("SampleFilterContract", "rollout_hooks"),
    "sample_hooks": ("SampleHookContract", "rollout_hooks"),
    "slime.plugins": ("HookPluginContract", "hook_plugin"),
    "tool_parsers": ("ToolParserContract", "tools"),
    "tools": ("ToolContract", "tools"),
    "trainers": ("TrainerContract", "trainer"),
    "weight_post_writes": ("WeightPostWriteContract", "weight_post_write"),
    "weight_transports": ("WeightTransportContract", "weight_transport"),
}
"""Kind -> class, and its module in `contracts`; `functions` have nothing in common and no suite."""

_EXPORTS = {
    **{name: f"slime_core.testing.contracts.{module}" for name, module in _SUITES.values()},
    "Asked": "slime_core.testing.service",
    "CharTokenizer": "slime_core.engines.scripted",
    "Contract": "slime_core.testing.contracts.base",
    "LoopRun": "slime_core.testing.loop",
    "Reply": "slime_core.engines.scripted",
    "Request": "slime_core.engines.scripted",
    "ScriptedEngine": "slime_core.engines.scripted",
    "ScriptedService": "slime_core.testing.service",
}

__all__ = [
    "AdvantageContract",
    "AllSamplesProcessContract",
    "Asked",
    "BufferContract",
    "CharTokenizer",
    "Contract",
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
    "LoopRun",
    "LossContract",
    "LossReducerContract",
    "MegatronBeforeLogProbContract",
    "MegatronBeforeTrainStepContract",
    "MegatronInitContract",
    "MegatronModelContract",
    "MegatronModelProviderContract",
    "ModelContract",
    "RecipeContract",
    "Reply",
    "Request",
    "RewardContract",
    "RewardPostProcessContract",
    "RolloutContract",
    "RolloutLogContract",
    "SampleConverterContract",
    "SampleFilterContract",
    "SampleHookContract",
    "ScriptedEngine",
    "ScriptedService",
    "ToolContract",
    "ToolParserContract",
    "TrainerContract",
    "WeightPostWriteContract",
    "WeightTransportContract",
    "suite_of",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'slime_core.testing' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def suite_of(kind: str) -> type[Contract]:
    """The suite of a kind (`slime.plugins`: hook plugins); for one without, `Contract`, which loads the component."""
    name, _ = _SUITES.get(kind, ("Contract", ""))
    suite: type[Contract] = __getattr__(name)
    return suite
