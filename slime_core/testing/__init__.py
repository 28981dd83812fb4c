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
    from slime_core.testing.contracts.hooks import HookContract
    from slime_core.testing.contracts.loss import CustomLossContract, LossContract
    from slime_core.testing.contracts.megatron_model import MegatronModelContract
    from slime_core.testing.contracts.megatron_model_provider import MegatronModelProviderContract
    from slime_core.testing.contracts.model import ModelContract
    from slime_core.testing.contracts.recipe import RecipeContract
    from slime_core.testing.contracts.reward import RewardContract
    from slime_core.testing.contracts.rollout import RolloutContract
    from slime_core.testing.contracts.tools import ToolContract, ToolParserContract
    from slime_core.testing.contracts.train_data import (
        RewardPostProcessContract,
        SampleConverterContract,
    )
    from slime_core.testing.contracts.trainer import TrainerContract
    from slime_core.testing.loop import LoopRun
    from slime_core.testing.service import Asked, ScriptedService

_SUITES = {
    "advantages": ("AdvantageContract", "estimator"),
    "buffers": ("BufferContract", "buffer"),
    "corrections": ("CorrectionContract", "correction"),
    "custom_losses": ("CustomLossContract", "loss"),
    "data_sources": ("DataSourceContract", "data_source"),
    "engines": ("EngineContract", "engine"),
    "environments": ("EnvironmentContract", "environment"),
    "estimators": ("EstimatorContract", "estimator"),
    "filters": ("FilterContract", "filter"),
    "generators": ("GeneratorContract", "generator"),
    "loss_reducers": ("LossReducerContract", "correction"),
    "losses": ("LossContract", "loss"),
    "megatron_model_providers": ("MegatronModelProviderContract", "megatron_model_provider"),
    "megatron_models": ("MegatronModelContract", "megatron_model"),
    "models": ("ModelContract", "model"),
    "recipes": ("RecipeContract", "recipe"),
    "reward_post_processes": ("RewardPostProcessContract", "train_data"),
    "rewards": ("RewardContract", "reward"),
    "rollouts": ("RolloutContract", "rollout"),
    "sample_converters": ("SampleConverterContract", "train_data"),
    "slime.plugins": ("HookContract", "hooks"),
    "tool_parsers": ("ToolParserContract", "tools"),
    "tools": ("ToolContract", "tools"),
    "trainers": ("TrainerContract", "trainer"),
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
    "Asked",
    "BufferContract",
    "CharTokenizer",
    "Contract",
    "CorrectionContract",
    "CustomLossContract",
    "DataSourceContract",
    "EngineContract",
    "EnvironmentContract",
    "EstimatorContract",
    "FilterContract",
    "GeneratorContract",
    "HookContract",
    "LoopRun",
    "LossContract",
    "LossReducerContract",
    "MegatronModelContract",
    "MegatronModelProviderContract",
    "ModelContract",
    "RecipeContract",
    "Reply",
    "Request",
    "RewardContract",
    "RewardPostProcessContract",
    "RolloutContract",
    "SampleConverterContract",
    "ScriptedEngine",
    "ScriptedService",
    "ToolContract",
    "ToolParserContract",
    "TrainerContract",
    "suite_of",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'slime_core.testing' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def suite_of(kind: str) -> type[Contract]:
    """The suite of a kind or hook (`slime.plugins`: hook plugins); else `Contract`, which loads the component."""
    name, _ = _SUITES.get("slime.plugins" if kind.startswith("slime_") else kind, ("Contract", ""))
    suite: type[Contract] = __getattr__(name)
    return suite
