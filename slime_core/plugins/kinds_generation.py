"""Rows of the table of kinds: what makes, scores, chooses and reports samples, and what commands begin with."""

from __future__ import annotations

from slime_core.plugins.kind import BUILT_BY_NAME, BUILT_FROM_ARGS, Call, Kind
from slime_core.protocols import EngineTraits, GenerateTraits, RewardTraits, RolloutTraits

_SINGLE_REWARD = Call(("args", "sample"), "(args, sample[, evaluation], **kwargs) -> float", keywords=("evaluation",))
_BATCH_REWARD = Call(
    ("args", "samples"),
    "(args, samples[, evaluation], **kwargs) -> list[float]",
    keywords=("evaluation",),
    marker="samples",
)

GENERATION = (
    Kind(
        name="rewards",
        singular="reward",
        flags=("--rm-type", "--custom-rm-path"),
        canonical=("reward", "reward_func", "custom_rm", "batched_custom_rm"),
        calls=(_BATCH_REWARD, _SINGLE_REWARD),
        methods={
            "compute_reward": Call(
                ("prompts", "responses"), "(self, prompts, responses) -> list[float]", keywords=("evaluation",)
            )
        },
        construct=BUILT_BY_NAME,
        traits=RewardTraits,
        prefixes={"boxed_": "slime_core.plugins.boxed:boxed"},
    ),
    Kind(
        name="generators",
        singular="generator",
        flags=("--custom-generate-function-path",),
        traits=GenerateTraits,
        canonical=("generate",),
        calls=(
            Call(
                ("args", "sample", "sampling_params"),
                "async (args, sample, sampling_params[, evaluation][, context]) -> Sample | list[Sample]",
                keywords=("evaluation", "context"),
                awaited=True,
            ),
            Call(
                ("args", "samples"),
                "async (args, samples[, sampling_params][, evaluation][, context]) -> list[Sample]",
                keywords=("sampling_params", "evaluation", "context"),
                marker="samples",
                awaited=True,
            ),
        ),
    ),
    Kind(
        name="tools",
        singular="tool",
        flags=("--tools-path",),
        canonical=("tools", "tool"),
        lists=True,
    ),
    Kind(
        name="tool_parsers",
        singular="tool_parser",
        flags=("--tool-call-parser",),
        canonical=("ToolParser", "tool_parser"),
        methods={
            "parse": Call(("text", "tools"), "(self, text, tools=(), *, reasoning_open=False) -> ParsedTurn"),
            "render": Call(("calls",), "(self, calls) -> str"),
            "claims": Call(("chat_template",), "(self, chat_template) -> bool"),
        },
        construct=Call((), "()"),
    ),
    Kind(
        name="environments",
        singular="environment",
        flags=("--environment-path",),
        canonical=("Environment", "environment"),
        methods={
            "reset": Call(("sample",), "(self, sample) -> text, chat messages or None"),
            "step": Call(("action",), "(self, action[, turn]) -> slime_core.Step", keywords=("turn",)),
            "close": Call((), "(self) -> None"),
        },
        construct=BUILT_BY_NAME,
    ),
    Kind(
        name="buffers",
        singular="buffer",
        flags=("--buffer-filter-path",),
        canonical=("buffer_filter", "Buffer"),
        calls=(
            Call(
                ("args", "rollout_id", "buffer", "num_samples"),
                "(args, rollout_id, buffer, num_samples) -> list[Group]",
            ),
            Call(("args", "buffer", "num_samples"), "(args, buffer, num_samples) -> list[Sample]"),
        ),
        methods={
            "begin_rollout": Call(("rollout_id", "weight_version"), "(self, rollout_id, weight_version) -> None"),
            "add": Call(("groups",), "(self, groups) -> None"),
            "take": Call(("num_groups",), "(self, num_groups) -> list[Group]"),
            "wants": Call(("prompt",), "(self, prompt) -> bool"),
            "observe": Call(("groups", "trained"), "(self, groups, trained) -> None"),
            "take_metrics": Call((), "(self) -> dict[str, float]"),
            "state_dict": Call((), "(self) -> dict"),
            "load_state_dict": Call(("state",), "(self, state) -> None"),
        },
        construct=BUILT_BY_NAME,
    ),
    Kind(
        name="filters",
        singular="filter",
        flags=("--dynamic-sampling-filter-path",),
        canonical=("dynamic_filter", "dynamic_sampling_filter", "filter"),
        calls=(Call(("args", "samples"), "(args, samples, **kwargs) -> FilterDecision | bool", plain=True),),
    ),
    Kind(
        name="data_sources",
        singular="data_source",
        flags=("--data-source-path",),
        canonical=("data_source", "DataSource"),
        methods={
            "get_samples": Call(("num_samples",), "(self, num_samples) -> list[Group]"),
            "add_samples": Call(("samples",), "(self, samples) -> None"),
        },
        construct=BUILT_BY_NAME,
    ),
    Kind(
        name="rollouts",
        singular="rollout",
        flags=("--rollout-function-path", "--eval-function-path"),
        traits=RolloutTraits,
        canonical=("generate_rollout", "rollout"),
        calls=(
            Call(
                ("args", "rollout_id", "data_source"),
                "(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | RolloutFnEvalOutput",
                keywords=("evaluation", "context"),
            ),
        ),
    ),
    Kind(
        name="engines",
        singular="engine",
        flags=("--rollout-engine",),
        traits=EngineTraits,
        canonical=("engine", "Engine"),
        methods={
            "generate": Call(("input_ids", "sampling_params"), "async (self, input_ids, sampling_params, *, rid=None)"),
            "start": Call((), "async (self)"),
            "stop": Call((), "async (self)"),
        },
        construct=BUILT_FROM_ARGS,
    ),
    Kind(
        name="recipes",
        singular="recipe",
        flags=("--prepare-path",),
        canonical=("prepare", "recipe"),
        calls=(Call(("args",), "(args) -> None"),),
    ),
)
