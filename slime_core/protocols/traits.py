"""What a component can do beyond its protocol: one frozen class per kind, whose defaults are "nothing of it".

A class declares `traits = EngineTraits(takes_images=True)`, a function has the decorator `declares`, and who wants to
know asks `traits_of`. `plugins.resolve` asks first, so what is declared wrongly ends the command before it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from slime_core.errors import PluginError, name_of
from slime_core.sample import Sample


@dataclass(frozen=True)
class Traits:
    """Base of the traits of every kind."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, wanted = getattr(self, field.name), type(field.default)
            if field.default is not None and not isinstance(value, wanted):
                raise PluginError(
                    f"{type(self).__name__}: {field.name} = {value!r} is no {wanted.__name__}, such as"
                    f" {field.default!r}, which it is where nothing is said"
                )


@dataclass(frozen=True)
class EngineTraits(Traits):
    """Of an engine's class."""

    true_on_policy: bool = False
    """It computes the trainer's bits under `--true-on-policy-mode`."""
    returns_routed_experts: bool = False
    """It answers with `meta_info["routed_experts"]` under `--use-rollout-routing-replay`."""
    returns_sampling_mask: bool = False
    """Under `--use-sampling-mask` it answers with `meta_info["output_token_sampling_mask"]`, and its log-probs are of
    the softmax over it."""
    takes_images: bool = False
    """`generate` has the keyword `image_data`; without it a run with `--multimodal-keys` is refused."""
    pause_modes: tuple[str, ...] = ("in_place", "abort")
    """What `pause` takes."""
    runs_elsewhere: bool = False
    """A run starts nothing for it, so it takes no place in a cluster unless it has a `launch_plan`."""
    uses: frozenset[str] = frozenset()
    """Settings it acts on, among those that only some components do (`config.support.BY_COMPONENT`); the others are
    refused or warned of."""


@dataclass(frozen=True)
class TrainerTraits(Traits):
    """Of a trainer's class."""

    true_on_policy: bool = False
    """It computes the engine's bits under `--true-on-policy-mode`."""
    sampling_mask: bool = False
    """Log-probs and entropy of every role are of the softmax over `TrainBatch.rollout_top_p_token_ids`, where set."""
    takes_images: bool = False
    """It trains on `TrainBatch.multimodal_train_inputs`; without it a run with `--multimodal-keys` is refused."""
    routing_replay: bool = False
    """It follows `TrainBatch.routed_experts` where it is set: all forward passes of the actor and the old actor use the
    experts it names, with the weights of their own router, and their `log_probs` and `log_probs_and_entropy` write the
    experts they used where it has -1. Reference, teacher and critic route freely."""
    collective_weights: bool = False
    """`named_weights` is a collective call: every process iterates it to its end, and only that of torch's rank 0 gets
    pairs."""
    reads_megatron: bool = False
    """Weights that it starts from may be in Megatron's format, which it tells by `checkpoint.sources`."""
    uses: frozenset[str] = frozenset()
    """As an engine's."""


@dataclass(frozen=True)
class TransportTraits(Traits):
    """Of a weight transport's class."""

    writes_files: bool = False
    """Versions are directories below `--update-weight-disk-dir`, which trainer and engines see under one path."""
    arrives_by: str | None = None
    """Engines that take this transport ("tensor", say) take yours as well: `deliver` hands the weights over by it.
    None: only engines whose `weight_transports` have your transport's name."""
    uses: frozenset[str] = frozenset()
    """As an engine's."""


@dataclass(frozen=True)
class LauncherTraits(Traits):
    """What `--launcher auto` takes for a wish for this launcher, and what it can do."""

    settings: tuple[str, ...] = ()
    """Settings that only this launcher acts on, such as `ray_address`: one that is given chooses it."""
    variables: tuple[str, ...] = ()
    """Environment variables that choose it, where no such setting does and torchrun has not started the process."""
    spans_nodes: bool = False
    """It starts the trainer's processes itself, on every node; torchrun has nothing to start."""
    restarts_trainer: bool = False
    """It acts on `--max-trainer-restarts`."""
    restarts_engines: bool = False
    """It starts an engine that lives in this framework's processes again (`--use-fault-tolerance`)."""


@dataclass(frozen=True)
class GenerateTraits(Traits):
    """Of a generate function."""

    uses_environment: bool = False
    """Its samples act in `--environment-path`."""
    takes_images: bool = False
    """It hands `sample.image_data()` to the engine."""
    check: Callable[..., None] | None = None
    """`(args, *, training)`: raises ConfigError for settings it cannot be used with, before anything starts."""


@dataclass(frozen=True)
class RolloutTraits(Traits):
    """Of a rollout function."""

    needs_engine: bool = True
    """False: the launcher brings up no engine."""
    replays: bool = False
    """It may train on a group any number of times."""
    leaves_out: bool = True
    """False: it accounts for every group that it draws, to which `slime ledger verify` holds it."""
    records_evaluation: bool = False
    """Its evaluations are recorded sample by sample."""


@dataclass(frozen=True)
class RewardTraits(Traits):
    """Of a reward function, or of an object of a reward's class."""

    execution: Literal["inline", "thread", "process"] | None = None
    """Where it runs (`plugins.execution`); None: what is usual for a function of its form."""
    scores_groups: bool = False
    """Its list of samples must be the whole group, since scores depend on each other."""
    extract_answer: Callable[[Sample], str | None] | None = None
    """A sample -> the answer it reads out of the response, for votes (`plugins.answers`)."""
    check: Callable[..., None] | None = None
    """As a generate function's."""


@dataclass(frozen=True)
class EditTraits(Traits):
    """Of what sees samples that are to be trained on: a dynamic filter, a buffer, a hook around a rollout."""

    edits_samples: bool = False
    """It may change what they are trained on (`admission.Sealed`); without this such a change is an error."""


T = TypeVar("T", bound=Traits)
F = TypeVar("F", bound=Callable[..., Any])


def declares(traits: Traits) -> Callable[[F], F]:
    """Decorator that says what a function can do: `@declares(RewardTraits(execution="thread"))`."""

    def declare(function: F) -> F:
        vars(function)["traits"] = traits
        return function

    return declare


def traits_of(component: object, kind: type[T], label: str = "") -> T:
    """What a component (its class, an object or a function) declares; the defaults where that is nothing.

    Raises:
        PluginError: It declares something else than traits of its kind, or has one as an attribute of its own, which
            nobody would read; the message begins with `label`.
    """
    found = getattr(component, "traits", None)
    if isinstance(found, kind):
        return found
    loose = [field.name for field in fields(kind) if hasattr(component, field.name)]
    if found is None and not loose:
        return kind()
    name = label or name_of(component)
    said = (
        f"its traits are {type(found).__name__}"
        if found is not None
        else f"{loose[0]} = {getattr(component, loose[0])!r}"
    )
    raise PluginError(f"{name}: {said}; write {_written(component, kind, loose)}")


def with_defaults(found: type, base: type) -> type[Any]:
    """A component's class with all of its kind's contract: its own, else that of the kind's base class."""
    own = {"__module__": found.__module__, "__doc__": found.__doc__}
    return found if issubclass(found, base) else type(found.__name__, (found, base), own)


def _written(component: object, kind: type[Traits], names: Sequence[str]) -> str:
    given = ", ".join(f"{name}={getattr(component, name)!r}" for name in names) or "..."
    of_class = isinstance(component, type) or not hasattr(component, "__name__")
    return f"traits = {kind.__name__}({given}) in its class" if of_class else f"@declares({kind.__name__}({given}))"
