"""slime: reinforcement-learning post-training of language models, extended by plugins.

The public API, loaded lazily (PEP 562): importing `slime_core` loads neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.buffer import BufferBase
    from slime_core.data.prompts import DatasetSource
    from slime_core.data.tokenizer import encode_prompt, encode_result
    from slime_core.data.tools import prompt_tools, run_tools, tool_parser
    from slime_core.data.turns import turn_delta
    from slime_core.errors import SlimeError
    from slime_core.estimator import EstimatorBase
    from slime_core.fan_out import execution_rewards, executions
    from slime_core.launch.findings import Finding, Level
    from slime_core.learning.corrections import CorrectionInputs, CorrectionOutputs
    from slime_core.plugins.adapters import GenerateCaller, RewardCaller
    from slime_core.plugins.answers import answer_extractor, answer_of
    from slime_core.plugins.boxed import last_boxed
    from slime_core.plugins.hookspecs import hookimpl
    from slime_core.plugins.numerals import same_number
    from slime_core.plugins.options import PluginOptions, options
    from slime_core.plugins.resolve import resolve
    from slime_core.protocols import (
        AdvantageInputs,
        Advantages,
        Args,
        Command,
        EditTraits,
        EngineTraits,
        GenerateContext,
        GenerateTraits,
        LauncherTraits,
        LossInputs,
        LossOutputs,
        RewardInputs,
        RewardTraits,
        RolloutTraits,
        TrainerTraits,
        declares,
    )
    from slime_core.protocols.environment import Environment, Step, Turn
    from slime_core.provenance import Source, Span
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
    "Args": "slime_core.protocols",
    "BufferBase": "slime_core.buffer",
    "Command": "slime_core.protocols",
    "CorrectionInputs": "slime_core.learning.corrections",
    "CorrectionOutputs": "slime_core.learning.corrections",
    "DatasetSource": "slime_core.data.prompts",
    "DynamicFilterOutput": "slime_core.types",
    "EditTraits": "slime_core.protocols",
    "EngineTraits": "slime_core.protocols",
    "Environment": "slime_core.protocols.environment",
    "EstimatorBase": "slime_core.estimator",
    "FilterDecision": "slime_core.types",
    "Finding": "slime_core.launch.findings",
    "GenerateCaller": "slime_core.plugins.adapters",
    "GenerateContext": "slime_core.protocols",
    "GenerateTraits": "slime_core.protocols",
    "GenerationOutput": "slime_core.types",
    "Group": "slime_core.types",
    "LauncherTraits": "slime_core.protocols",
    "Level": "slime_core.launch.findings",
    "LossInputs": "slime_core.protocols",
    "LossOutputs": "slime_core.protocols",
    "PluginOptions": "slime_core.plugins.options",
    "RewardCaller": "slime_core.plugins.adapters",
    "RewardInputs": "slime_core.protocols",
    "RewardTraits": "slime_core.protocols",
    "RolloutFnEvalOutput": "slime_core.types",
    "RolloutFnTrainOutput": "slime_core.types",
    "RolloutTraits": "slime_core.protocols",
    "Sample": "slime_core.types",
    "SampleStatus": "slime_core.types",
    "SlimeError": "slime_core.errors",
    "Source": "slime_core.provenance",
    "Span": "slime_core.provenance",
    "Step": "slime_core.protocols.environment",
    "TrainBatch": "slime_core.types",
    "TrainerTraits": "slime_core.protocols",
    "Turn": "slime_core.protocols.environment",
    "answer_extractor": "slime_core.plugins.answers",
    "answer_of": "slime_core.plugins.answers",
    "declares": "slime_core.protocols",
    "encode_prompt": "slime_core.data.tokenizer",
    "encode_result": "slime_core.data.tokenizer",
    "execution_rewards": "slime_core.fan_out",
    "executions": "slime_core.fan_out",
    "hookimpl": "slime_core.plugins.hookspecs",
    "last_boxed": "slime_core.plugins.boxed",
    "options": "slime_core.plugins.options",
    "resolve": "slime_core.plugins.resolve",
    "run_tools": "slime_core.data.tools",
    "same_number": "slime_core.plugins.numerals",
    "prompt_tools": "slime_core.data.tools",
    "tool_parser": "slime_core.data.tools",
    "turn_delta": "slime_core.data.turns",
}

__all__ = [
    "AdvantageInputs",
    "Advantages",
    "Args",
    "BufferBase",
    "Command",
    "CorrectionInputs",
    "CorrectionOutputs",
    "DatasetSource",
    "DynamicFilterOutput",
    "EditTraits",
    "EngineTraits",
    "Environment",
    "EstimatorBase",
    "FilterDecision",
    "Finding",
    "GenerateCaller",
    "GenerateContext",
    "GenerateTraits",
    "GenerationOutput",
    "Group",
    "LauncherTraits",
    "Level",
    "LossInputs",
    "LossOutputs",
    "PluginOptions",
    "RewardCaller",
    "RewardInputs",
    "RewardTraits",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "RolloutTraits",
    "Sample",
    "SampleStatus",
    "SlimeError",
    "Source",
    "Span",
    "Step",
    "TrainBatch",
    "TrainerTraits",
    "Turn",
    "__version__",
    "answer_extractor",
    "answer_of",
    "declares",
    "encode_prompt",
    "encode_result",
    "execution_rewards",
    "executions",
    "hookimpl",
    "last_boxed",
    "options",
    "resolve",
    "run_tools",
    "same_number",
    "prompt_tools",
    "tool_parser",
    "turn_delta",
]

_OF_PLUGINS = {
    "Candidate": "slime_generator_best_of_n",
    "Dialogue": "slime_environment_session",
    "EnvironmentSession": "slime_environment_session",
    "JsonClient": "slime_reward_remote",
    "Observations": "slime_generator_multi_turn",
    "Trajectory": "slime_agent_base_url",
    "candidate_rewards": "slime_generator_best_of_n",
    "get_model_url": "slime_engine_sglang",
    "planned_models": "slime_engine_sglang",
    "sample_candidates": "slime_generator_best_of_n",
}
"""Name -> the package of a plugin that has it."""


def __getattr__(name: str) -> Any:
    if name in _OF_PLUGINS:  # an ImportError, since `from slime_core import` leaves out what an AttributeError says
        raise ImportError(f"slime_core has no {name}; type: from {_OF_PLUGINS[name]} import {name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'slime_core' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
