"""The kinds of component that a run is made of, and the flags that take a function, one row (`Kind`) each.

Discovery, the resolver, the signature check and `slime plugins` read the rows (collected in `kinds.py`) and do not
branch on a kind. A flag whose function implements a hook has its row next to the hook (`hookspecs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slime_core.protocols import (
    EditTraits,
    EngineTraits,
    GenerateTraits,
    LauncherTraits,
    RewardTraits,
    RolloutTraits,
    TrainerTraits,
    TransportTraits,
)
from slime_core.protocols.traits import Traits

FUNCTIONS = "functions"
"""Kind of functions that belong to one flag and to no other kind."""


@dataclass(frozen=True)
class Call:
    """An accepted signature of a component."""

    shown: str
    """Signature as error messages print it. Names are passed by position, names after `*` by name. Names in brackets
    are passed by name to callables that declare a parameter of that name. A callable after `async` must be `async def`,
    or annotated to return an awaitable; one after `[async]` may be; the result of any other is not awaited."""
    marker: str | None = None
    """The call applies only to callables with a positional parameter of this name."""
    bare: bool = False
    """The callable may also take no argument by position."""

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """Names of the arguments that are passed by position."""
        return _names(self._always.partition("*, ")[0])

    @cached_property
    def named(self) -> tuple[str, ...]:
        """Names of the arguments that are always passed by name."""
        return _names(self._always.partition("*, ")[2])

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """Names of the arguments that are passed only to callables that declare such a parameter."""
        return tuple(re.findall(r"\[, (\w+)\]", self._inner))

    def of_method(self, name: str) -> str:
        """Return the signature with the name of a method, as messages print it."""
        return self.shown.replace("(", f"{name}(", 1)

    @property
    def awaited(self) -> bool:
        """Whether the callable must be asynchronous."""
        return self.shown.startswith("async")

    @property
    def plain(self) -> bool:
        """Whether the callable must not be asynchronous."""
        return self.shown.startswith("(")

    @property
    def _inner(self) -> str:
        return self.shown.partition("(")[2].partition(")")[0]

    @property
    def _always(self) -> str:
        return re.sub(r"\[[^]]*\]", "", self._inner)


def _names(text: str) -> tuple[str, ...]:
    """Return the parameter names without a default, except `self` and `**kwargs`."""
    return tuple(word for word in map(str.strip, text.split(",")) if word.isidentifier() and word != "self")


@dataclass(frozen=True)
class Kind:
    """A row of the table of kinds."""

    name: str
    """Plural, e.g. "rewards"."""
    flags: tuple[str, ...]
    """Settings that select a component of this kind."""
    canonical: tuple[str, ...]
    """Attribute names tried in order for a `file.py` spec without an attribute."""
    word: str = ""
    """Singular, if it is not the plural without its ending."""
    calls: tuple[Call, ...] = ()
    """Accepted signatures of a function; empty if the kind takes classes only, or any function."""
    methods: Mapping[str, Call] = field(default_factory=dict)
    """Methods a class must have."""
    construct: Call | None = None
    """Signature of a class's constructor; None if the kind takes functions only."""
    objects: bool = False
    """True if an object with the methods is accepted, and a class that has `__call__` in their place."""
    by_name: bool = False
    """True if the constructor may take more parameters than the settings (`signatures.construct`)."""
    instance: str = ""
    """Name in `slime_core.protocols` of the class that the object must be an instance of; its code is method `run`."""
    lists: bool = False
    """True if a list or tuple of such objects is also a component."""
    traits: type[Traits] | None = None
    """Class of the traits that a component of this kind may declare."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of a registered name, e.g. `boxed_math` is `math` wrapped by `boxed_rewards` of `slime.api`."""
    api: int = 1
    """Version of the contract, incremented by an incompatible change (`resolve.check_api`)."""
    deprecated: tuple[int, ...] = ()
    """Versions before `api` that are still loaded with a warning, for one release."""
    replaces: bool = False
    """True for a flag whose function replaces one step; functions of all such flags are registered in one group."""
    trains: bool = False
    """True if the hook that the function of this flag implements is called only in a run that trains."""

    @property
    def singular(self) -> str:
        """Singular name, as in messages and distributions."""
        return self.word or self.name.removesuffix("es" if self.name.endswith("sses") else "s")

    @property
    def group(self) -> str:
        """Entry-point group."""
        return f"slime.{self.registered}"

    @property
    def registered(self) -> str:
        """The kind under which names are registered."""
        return FUNCTIONS if self.replaces else self.name

    @property
    def setting(self) -> str:
        """Name of the setting with the function's path or a list of paths, for a row of one flag."""
        return self.flags[0].removeprefix("--").replace("-", "_")

    @property
    def is_hook(self) -> bool:
        """True if the function of this flag implements the hook `name`. It is given by path; none are registered."""
        return self.name.startswith("slime_")

    @property
    def may_wait(self) -> bool:
        """True if the caller of the hook awaits its result and handles its errors."""
        return not self.calls[0].plain


_SINGLE_REWARD = Call("[async] (args, sample[, evaluation], **kwargs) -> float")
_BATCH_REWARD = Call("[async] (args, samples[, evaluation], **kwargs) -> list[float]", marker="samples")

COMPONENTS = (
    # -- what makes, scores, chooses and reports samples, and what commands begin with
    Kind(
        name="rewards",
        flags=("--rm-type", "--custom-rm-path"),
        canonical=("reward", "reward_func", "compute_score", "custom_rm", "batched_custom_rm"),
        calls=(_BATCH_REWARD, _SINGLE_REWARD),
        methods={"compute_reward": Call("[async] (self, prompts, responses[, evaluation]) -> list[float]")},
        construct=Call("(args)"),
        objects=True,
        by_name=True,
        traits=RewardTraits,
        prefixes=("boxed_",),
    ),
    Kind(
        name="generators",
        flags=("--custom-generate-function-path",),
        traits=GenerateTraits,
        canonical=("generate",),
        calls=(
            Call("async (args, sample, sampling_params[, evaluation][, context]) -> Sample | list[Sample]"),
            Call(
                "async (args, samples[, sampling_params][, evaluation][, context]) -> list[Sample]",
                marker="samples",
            ),
        ),
    ),
    Kind(
        name="tools",
        flags=("--tools-path",),
        canonical=("tools", "tool"),
        lists=True,
    ),
    Kind(
        name="tool_parsers",
        flags=("--tool-call-parser",),
        canonical=("ToolParser", "tool_parser"),
        methods={
            "parse": Call("(self, text, tools, *, reasoning_open=False) -> ParsedTurn"),
            "render": Call("(self, calls) -> str"),
            "claims": Call("(self, chat_template) -> bool"),
        },
        construct=Call("()"),
    ),
    Kind(
        name="environments",
        flags=("--environment-path",),
        canonical=("Environment", "environment"),
        methods={
            "reset": Call("[async] (self, sample[, seed]) -> text, chat messages or None", bare=True),
            "step": Call("[async] (self, action[, turn]) -> slime_core.Step or (observation, reward, done)"),
        },
        construct=Call("(args)"),
        by_name=True,
    ),
    Kind(
        name="buffers",
        traits=EditTraits,
        flags=("--buffer-filter-path",),
        canonical=("buffer_filter", "Buffer"),
        calls=(
            Call("(args, rollout_id, buffer, num_samples) -> list[Group]"),
            Call("(args, buffer, num_samples) -> list[Sample]"),
        ),
        methods={
            "begin_rollout": Call("(self, rollout_id, weight_version) -> None"),
            "add": Call("(self, groups) -> None"),
            "take": Call("(self, num_groups) -> list[Group]"),
            "wants": Call("(self, prompt) -> bool"),
            "observe": Call("(self, groups, trained) -> None"),
            "take_metrics": Call("(self) -> dict[str, float]"),
            "state_dict": Call("(self) -> dict"),
            "load_state_dict": Call("(self, state) -> None"),
        },
        construct=Call("(args)"),
        objects=True,
        by_name=True,
    ),
    Kind(
        name="filters",
        traits=EditTraits,
        flags=("--dynamic-sampling-filter-path",),
        canonical=("dynamic_filter", "dynamic_sampling_filter", "filter"),
        calls=(Call("(args, samples, **kwargs) -> FilterDecision | bool"),),
    ),
    Kind(
        name="data_sources",
        flags=("--data-source-path",),
        canonical=("data_source", "DataSource"),
        methods={
            "get_samples": Call("(self, num_samples) -> list[Group]"),
            "add_samples": Call("(self, samples) -> None"),
        },
        construct=Call("(args)"),
        by_name=True,
    ),
    Kind(
        name="rollouts",
        flags=("--rollout-function-path", "--eval-function-path"),
        traits=RolloutTraits,
        canonical=("generate_rollout", "rollout"),
        calls=(
            Call(
                "[async] (args, rollout_id, data_source[, evaluation][, context])"
                " -> RolloutFnTrainOutput | RolloutFnEvalOutput"
            ),
        ),
    ),
    Kind(
        name="engines",
        flags=("--rollout-engine",),
        traits=EngineTraits,
        canonical=("engine", "Engine"),
        methods={
            "generate": Call("async (self, input_ids, sampling_params, *, rid=None)"),
            "start": Call("async (self)"),
            "stop": Call("async (self)"),
        },
        construct=Call("(args)"),
    ),
    Kind(
        name="recipes",
        flags=("--prepare-path",),
        canonical=("prepare", "recipe"),
        calls=(Call("(args) -> None"),),
    ),
    # -- what becomes of samples in the trainer
    Kind(
        name="estimators",
        flags=("--advantage-estimator",),
        canonical=("estimator", "compute_advantages"),
        calls=(Call("(args, rollout_data) -> None"),),
        methods={
            "shape_rewards": Call("(self, args, inputs) -> list[float]"),
            "advantages": Call("(self, args, inputs) -> Advantages"),
            "policy_loss": Call("(self, args, inputs) -> LossOutputs"),
        },
        construct=Call("(args)"),
    ),
    Kind(
        name="models",
        flags=("model_type in config.json of --hf-checkpoint",),
        canonical=("model",),
        calls=(Call("(hf) -> ModelConfig"),),
    ),
    Kind(
        name="megatron_models",
        flags=("model_type in config.json of --hf-checkpoint, for --train-backend megatron",),
        canonical=("megatron",),
        calls=(Call("(hf) -> MegatronModel"),),
    ),
    Kind(
        name="losses",
        flags=("--loss-type",),
        canonical=("loss", "Loss"),
        methods={"bind": Call("(self, batch, tensors, denominators) -> LossFn")},
        construct=Call("(args, estimator)"),
    ),
    Kind(
        name="trainers",
        flags=("--train-backend",),
        traits=TrainerTraits,
        canonical=("trainer", "Trainer"),
        methods={
            "train_step": Call("(self, batch, micro_batches, loss_fn)"),
            "log_probs": Call("(self, batch, micro_batches, *, role='actor')"),
            "named_weights": Call("(self)"),
        },
        construct=Call("(args[, role][, hooks])"),
    ),
    Kind(
        name="weight_transports",
        flags=("--update-weight-transport", "--update-weight-mode"),
        canonical=("Transport", "WeightTransport"),
        methods={"send": Call("(self, weights, version, engines) -> metrics")},
        construct=Call("(args)"),
        traits=TransportTraits,
    ),
    Kind(
        name="corrections",
        flags=("--custom-tis-function-path",),
        canonical=("correction", "tis_function", "custom_tis_function", "compute_mis_weights_with_cp"),
        calls=(
            Call(
                "(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)"
                " -> (pg_loss, loss_masks, metrics)"
            ),
        ),
        methods={"weigh": Call("(self, inputs) -> CorrectionOutputs")},
        construct=Call("(args)"),
        objects=True,
    ),
    Kind(
        name="launchers",
        flags=("--launcher",),
        canonical=("launcher", "Launcher"),
        methods={
            "train": Call("(self, settings) -> dict"),
            "missing": Call("(self, args) -> str"),
        },
        construct=Call("()"),
        traits=LauncherTraits,
    ),
    Kind(
        name="commands",
        flags=("the first word after `slime`",),
        canonical=("command",),
        instance="Command",
    ),
    Kind(name=FUNCTIONS, flags=("a --*-path flag of a function",), canonical=()),
)

FUNCTION_FLAGS = (
    Kind(
        replaces=True,
        name="reward_post_processes",
        flags=("--custom-reward-post-process-path",),
        canonical=("post_process_rewards", "reward_post_process", "custom_reward_post_process"),
        calls=(Call("(args, samples) -> (raw_rewards, rewards)"),),
    ),
    Kind(
        replaces=True,
        name="sample_converters",
        flags=("--custom-convert-samples-to-train-data-path",),
        canonical=("convert_samples_to_train_data", "convert_samples"),
        calls=(Call("(args, samples) -> dict"),),
    ),
    Kind(
        replaces=True,
        name="advantages",
        flags=("--custom-advantage-function-path",),
        canonical=("compute_advantages", "compute_advantages_and_returns", "advantages"),
        calls=(Call("(args, rollout_data) -> None"),),
    ),
    Kind(
        replaces=True,
        name="loss_reducers",
        flags=("--custom-pg-loss-reducer-function-path",),
        canonical=("reducer", "get_pg_loss_reducer", "pg_loss_reducer"),
        calls=(
            Call(
                "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss[, args]) -> (tensor) -> scalar"
            ),
        ),
    ),
    Kind(
        replaces=True,
        name="custom_losses",
        flags=("--custom-loss-function-path",),
        canonical=("custom_loss", "loss_function", "loss"),
        calls=(Call("(args, batch, logits, sum_of_sample_mean) -> (loss, dict of metrics)"),),
    ),
)
"""Kinds of function that replace one step on the trainer's side."""
