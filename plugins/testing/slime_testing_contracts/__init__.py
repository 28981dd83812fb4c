"""For plugin authors: a contract suite per kind, an engine that follows a script, and a whole run as a fixture.

Subclass a suite in a test file, name the component, add examples; pytest runs it::

    from slime_testing_contracts import RewardContract

    class TestMath(RewardContract):
        component = "math"
        examples = [("1+1=", r"\\boxed{2}", "2", 1.0), ("1+1=", r"\\boxed{3}", "2", 0.0)]

slime's own plugins are held to the same suites, which `slime plugins check` finds by entry point (`slime.contracts`).
One of a kind of your own is a subclass of `Contract`, named by an entry point `<kind> = "module:Class"` of that group.
The suites need pytest, `tiny` does not. Loaded lazily (PEP 562), since pytest imports this package in every run of an
environment that has it; then the suites' asserts are rewritten, so that a failure shows values.
"""

from __future__ import annotations

import pkgutil
import sys
from typing import TYPE_CHECKING, Any

from slime_core.lazy import Exports

if TYPE_CHECKING:
    from slime_testing_probes.scripted import CharTokenizer as CharTokenizer
    from slime_testing_probes.scripted import Reply as Reply
    from slime_testing_probes.scripted import Request as Request
    from slime_testing_probes.scripted import ScriptedEngine as ScriptedEngine

    from slime_testing_contracts.base import Contract as Contract
    from slime_testing_contracts.base import suite_of as suite_of
    from slime_testing_contracts.base import suites as suites
    from slime_testing_contracts.buffer import BufferContract as BufferContract
    from slime_testing_contracts.command import CommandContract as CommandContract
    from slime_testing_contracts.command import LauncherContract as LauncherContract
    from slime_testing_contracts.command import RecipeContract as RecipeContract
    from slime_testing_contracts.correction import CorrectionContract as CorrectionContract
    from slime_testing_contracts.correction import LossReducerContract as LossReducerContract
    from slime_testing_contracts.data_source import DataSourceContract as DataSourceContract
    from slime_testing_contracts.engine import EngineContract as EngineContract
    from slime_testing_contracts.environment import EnvironmentContract as EnvironmentContract
    from slime_testing_contracts.estimator import AdvantageContract as AdvantageContract
    from slime_testing_contracts.estimator import EstimatorContract as EstimatorContract
    from slime_testing_contracts.filter import FilterContract as FilterContract
    from slime_testing_contracts.generator import GeneratorContract as GeneratorContract
    from slime_testing_contracts.hooks import HookContract as HookContract
    from slime_testing_contracts.loop import LoopRun as LoopRun
    from slime_testing_contracts.loss import CustomLossContract as CustomLossContract
    from slime_testing_contracts.loss import LossContract as LossContract
    from slime_testing_contracts.megatron_model import MegatronModelContract as MegatronModelContract
    from slime_testing_contracts.megatron_model import MegatronModelProviderContract as MegatronModelProviderContract
    from slime_testing_contracts.model import ModelContract as ModelContract
    from slime_testing_contracts.reward import RewardContract as RewardContract
    from slime_testing_contracts.rollout import RolloutContract as RolloutContract
    from slime_testing_contracts.service import Asked as Asked
    from slime_testing_contracts.service import ScriptedService as ScriptedService
    from slime_testing_contracts.tools import ToolContract as ToolContract
    from slime_testing_contracts.tools import ToolParserContract as ToolParserContract
    from slime_testing_contracts.train_data import RewardPostProcessContract as RewardPostProcessContract
    from slime_testing_contracts.train_data import SampleConverterContract as SampleConverterContract
    from slime_testing_contracts.trainer import TrainerContract as TrainerContract
    from slime_testing_contracts.weight_transport import WeightTransportContract as WeightTransportContract

_EXPORTS = Exports(__name__, __file__)
__all__ = [*_EXPORTS.places]

if sys.modules.get("pytest"):
    import pytest

    pytest.register_assert_rewrite(*(f"{__name__}.{found.name}" for found in pkgutil.iter_modules(__path__)))


def __getattr__(name: str) -> Any:
    return _EXPORTS.load(name)
