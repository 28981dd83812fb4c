"""For plugin authors: a contract suite per kind, an engine that follows a script, and a whole run as a fixture.

Subclass a suite in a test file, name the component, add examples; pytest runs it::

    from slime_testing_contracts import RewardContract

    class TestMath(RewardContract):
        component = "math"
        examples = [("1+1=", r"\\boxed{2}", "2", 1.0), ("1+1=", r"\\boxed{3}", "2", 0.0)]

slime's own plugins are held to the same suites, which `slime plugins check` finds by entry point (`slime.contracts`).
One of a kind of your own is a subclass of `Contract`, named by an entry point `<kind> = "module:Class"` of that group.
Needs pytest. Loaded lazily (PEP 562), since pytest imports this package in every run of an environment that has it;
what happens here is that the suites' asserts are rewritten, so that a failure shows values.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from slime_testing_probes.scripted import CharTokenizer, Reply, Request, ScriptedEngine

    from slime_testing_contracts.base import Contract, suite_of, suites
    from slime_testing_contracts.buffer import BufferContract
    from slime_testing_contracts.command import CommandContract
    from slime_testing_contracts.correction import CorrectionContract, LossReducerContract
    from slime_testing_contracts.data_source import DataSourceContract
    from slime_testing_contracts.engine import EngineContract
    from slime_testing_contracts.environment import EnvironmentContract
    from slime_testing_contracts.estimator import AdvantageContract, EstimatorContract
    from slime_testing_contracts.filter import FilterContract
    from slime_testing_contracts.generator import GeneratorContract
    from slime_testing_contracts.hooks import HookContract
    from slime_testing_contracts.launcher import LauncherContract
    from slime_testing_contracts.loop import LoopRun
    from slime_testing_contracts.loss import CustomLossContract, LossContract
    from slime_testing_contracts.megatron_model import MegatronModelContract
    from slime_testing_contracts.megatron_model_provider import MegatronModelProviderContract
    from slime_testing_contracts.model import ModelContract
    from slime_testing_contracts.recipe import RecipeContract
    from slime_testing_contracts.reward import RewardContract
    from slime_testing_contracts.rollout import RolloutContract
    from slime_testing_contracts.service import Asked, ScriptedService
    from slime_testing_contracts.tools import ToolContract, ToolParserContract
    from slime_testing_contracts.train_data import (
        RewardPostProcessContract,
        SampleConverterContract,
    )
    from slime_testing_contracts.trainer import TrainerContract
    from slime_testing_contracts.weight_transport import WeightTransportContract

_EXPORTS = {
    "AdvantageContract": ".estimator",
    "Asked": ".service",
    "BufferContract": ".buffer",
    "CharTokenizer": "slime_testing_probes.scripted",
    "CommandContract": ".command",
    "Contract": ".base",
    "CorrectionContract": ".correction",
    "CustomLossContract": ".loss",
    "DataSourceContract": ".data_source",
    "EngineContract": ".engine",
    "EnvironmentContract": ".environment",
    "EstimatorContract": ".estimator",
    "FilterContract": ".filter",
    "GeneratorContract": ".generator",
    "HookContract": ".hooks",
    "LauncherContract": ".launcher",
    "LoopRun": ".loop",
    "LossContract": ".loss",
    "LossReducerContract": ".correction",
    "MegatronModelContract": ".megatron_model",
    "MegatronModelProviderContract": ".megatron_model_provider",
    "ModelContract": ".model",
    "RecipeContract": ".recipe",
    "Reply": "slime_testing_probes.scripted",
    "Request": "slime_testing_probes.scripted",
    "RewardContract": ".reward",
    "RewardPostProcessContract": ".train_data",
    "RolloutContract": ".rollout",
    "SampleConverterContract": ".train_data",
    "ScriptedEngine": "slime_testing_probes.scripted",
    "ScriptedService": ".service",
    "suite_of": ".base",
    "suites": ".base",
    "ToolContract": ".tools",
    "ToolParserContract": ".tools",
    "TrainerContract": ".trainer",
    "WeightTransportContract": ".weight_transport",
}
"""Name -> module."""

__all__ = [
    "AdvantageContract",
    "Asked",
    "BufferContract",
    "CharTokenizer",
    "CommandContract",
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
    "LauncherContract",
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
    "suite_of",
    "suites",
    "ToolContract",
    "ToolParserContract",
    "TrainerContract",
    "WeightTransportContract",
]

pytest.register_assert_rewrite(*(f"{__name__}.{found.name}" for found in pkgutil.iter_modules(__path__)))


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
