"""slime: reinforcement-learning post-training of language models, extended by plugins.

The public API, loaded lazily (PEP 562): importing `slime_core` loads neither torch nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_core.lazy import Exports

if TYPE_CHECKING:
    from slime_core.data.buffer import BufferBase as BufferBase
    from slime_core.data.dumps import write_lines as write_lines
    from slime_core.data.prompts import DatasetSource as DatasetSource
    from slime_core.data.tokenizer import encode_prompt as encode_prompt
    from slime_core.data.tokenizer import encode_result as encode_result
    from slime_core.data.tools import prompt_tools as prompt_tools
    from slime_core.data.tools import run_tools as run_tools
    from slime_core.errors import SlimeError as SlimeError
    from slime_core.estimator import EstimatorBase as EstimatorBase
    from slime_core.learning.corrector import CorrectionInputs as CorrectionInputs
    from slime_core.learning.corrector import CorrectionOutputs as CorrectionOutputs
    from slime_core.plugins.adapters import GenerateCaller as GenerateCaller
    from slime_core.plugins.adapters import RewardCaller as RewardCaller
    from slime_core.plugins.answers import last_boxed as last_boxed
    from slime_core.plugins.answers import right_answers as right_answers
    from slime_core.plugins.answers import same_number as same_number
    from slime_core.plugins.hookspecs import hookimpl as hookimpl
    from slime_core.plugins.options import PluginOptions as PluginOptions
    from slime_core.plugins.options import options as options
    from slime_core.plugins.resolve import resolve as resolve
    from slime_core.protocols import AdvantageInputs as AdvantageInputs
    from slime_core.protocols import Advantages as Advantages
    from slime_core.protocols import Args as Args
    from slime_core.protocols import Command as Command
    from slime_core.protocols import EditTraits as EditTraits
    from slime_core.protocols import EngineTraits as EngineTraits
    from slime_core.protocols import GenerateContext as GenerateContext
    from slime_core.protocols import GenerateTraits as GenerateTraits
    from slime_core.protocols import LauncherTraits as LauncherTraits
    from slime_core.protocols import LossInputs as LossInputs
    from slime_core.protocols import LossOutputs as LossOutputs
    from slime_core.protocols import RewardInputs as RewardInputs
    from slime_core.protocols import RewardTraits as RewardTraits
    from slime_core.protocols import RolloutTraits as RolloutTraits
    from slime_core.protocols import TrainerTraits as TrainerTraits
    from slime_core.protocols import declares as declares
    from slime_core.protocols.command import Finding as Finding
    from slime_core.protocols.command import Level as Level
    from slime_core.protocols.environment import Environment as Environment
    from slime_core.protocols.environment import Step as Step
    from slime_core.protocols.environment import Turn as Turn
    from slime_core.sample import DynamicFilterOutput as DynamicFilterOutput
    from slime_core.sample import FilterDecision as FilterDecision
    from slime_core.sample import GenerationOutput as GenerationOutput
    from slime_core.sample import Group as Group
    from slime_core.sample import RolloutFnEvalOutput as RolloutFnEvalOutput
    from slime_core.sample import RolloutFnTrainOutput as RolloutFnTrainOutput
    from slime_core.sample import Sample as Sample
    from slime_core.sample import SampleStatus as SampleStatus
    from slime_core.sample import TrainBatch as TrainBatch
    from slime_core.sample.provenance import Source as Source
    from slime_core.sample.provenance import Span as Span
    from slime_core.sample.provenance import TurnSpan as TurnSpan
    from slime_core.sample.types import execution_rewards as execution_rewards
    from slime_core.sample.types import executions as executions

__version__ = "0.1.0"

_EXPORTS = Exports(
    __name__, __file__, provided=("Trainer", "answer_extractor", "answer_of", "tool_parser", "turn_delta")
)
__all__ = ["__version__", *_EXPORTS.places]

_OF_PLUGINS = {
    "Candidate": "slime_generators.best_of_n",
    "Dialogue": "slime_environments.session",
    "EnvironmentSession": "slime_environments.session",
    "JsonClient": "slime_rewards.remote",
    "Observations": "slime_generators.multi_turn",
    "Trajectory": "slime_agent_base_url",
    "candidate_rewards": "slime_generators.best_of_n",
    "get_model_url": "slime_engine_sglang",
    "planned_models": "slime_engine_sglang",
    "sample_candidates": "slime_generators.best_of_n",
}
"""Name -> the package of a plugin that has it."""


def __getattr__(name: str) -> Any:
    if name in _OF_PLUGINS:  # an ImportError, since `from slime_core import` leaves out what an AttributeError says
        raise ImportError(f"slime_core has no {name}; type: from {_OF_PLUGINS[name]} import {name}")
    return _EXPORTS.load(name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_EXPORTS.provided])
