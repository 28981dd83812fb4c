"""Optional abilities of components beyond their protocols: one frozen class per kind, whose defaults declare none.

A class declares `traits = EngineTraits(takes_images=True)`, a function has the decorator `declares`, and `traits_of`
reads the declaration. `plugins.resolve` calls `traits_of` first, so a wrong declaration ends the command early.
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
                    f"{type(self).__name__}: {field.name} is {value!r}; expected a {wanted.__name__}, such as the"
                    f" default {field.default!r}"
                )


@dataclass(frozen=True)
class EngineTraits(Traits):
    """Traits of an engine class."""

    true_on_policy: bool = False
    """Whether log-probs equal the trainer's bit for bit under `--true-on-policy-mode`."""
    returns_routed_experts: bool = False
    """Whether it returns `meta_info["routed_experts"]` under `--use-rollout-routing-replay`."""
    returns_sampling_mask: bool = False
    """Whether it returns `meta_info["output_token_sampling_mask"]` under `--use-sampling-mask`, with log-probs of the
    softmax over that mask."""
    takes_images: bool = False
    """Whether `generate` has the keyword `image_data`; if not, a run with `--multimodal-keys` is refused."""
    takes_adapters: bool = False
    """Whether `generate` has the keyword `adapter`; if not, a run with `--lora-adapters` is refused."""
    adds_adapters: bool = False
    """Whether an update may have `MODULE.lora_A` [rank, in] and `MODULE.lora_B` [out, rank], scaled, in place of the
    weights; if not, a run with `--lora-unmerged` is refused."""
    pause_modes: tuple[str, ...] = ("in_place", "abort")
    """Modes that `pause` accepts."""
    runs_elsewhere: bool = False
    """Whether it runs outside of the run, which then starts nothing; it needs no place in a cluster unless it has a
    `launch_plan`."""
    uses: frozenset[str] = frozenset()
    """Settings of `config.support.BY_COMPONENT` that it acts on. The other settings listed there are refused or log a
    warning."""


@dataclass(frozen=True)
class TrainerTraits(Traits):
    """Traits of a trainer class."""

    true_on_policy: bool = False
    """Whether log-probs equal the engine's bit for bit under `--true-on-policy-mode`."""
    sampling_mask: bool = False
    """Whether log-probs and entropy of every role use the softmax over `TrainBatch.rollout_top_p_token_ids`, if set."""
    takes_images: bool = False
    """Whether it trains on `TrainBatch.multimodal_train_inputs`; if not, a run with `--multimodal-keys` is refused."""
    takes_adapters: bool = False
    """Whether it runs each sample through the adapter that the entry "adapter" of its `train_metadata` names; if not, a
    run with `--lora-adapters` is refused."""
    moves_teacher: bool = False
    """Whether `update_teacher` may be called, and its result is saved."""
    routing_replay: bool = False
    """Whether it replays `TrainBatch.routed_experts`, if set. All forward passes of the actor and the old actor use
    these experts, with the weights of their own router. `log_probs` and `log_probs_and_entropy` replace each -1 by the
    expert that was used. Reference, teacher and critic route freely."""
    collective_weights: bool = False
    """Whether `named_weights` is a collective call: every process iterates to the end, and only torch's rank 0 receives
    pairs."""
    reads_megatron: bool = False
    """Whether its initial weights may be in Megatron's format, recognised by `checkpoint.sources`."""
    uses: frozenset[str] = frozenset()
    """Settings that it acts on, as in `EngineTraits.uses`."""


@dataclass(frozen=True)
class TransportTraits(Traits):
    """Traits of a weight transport class."""

    writes_files: bool = False
    """Whether versions are directories below `--update-weight-disk-dir`, a path shared by trainer and engines."""
    arrives_by: str | None = None
    """Another transport (e.g. "tensor") that `deliver` uses to hand over the weights; engines that accept that
    transport accept yours. None: only engines that list your transport's name in `weight_transports`."""
    uses: frozenset[str] = frozenset()
    """Settings that it acts on, as in `EngineTraits.uses`."""


@dataclass(frozen=True)
class LauncherTraits(Traits):
    """Traits of a launcher: conditions under which `--launcher auto` chooses it, and its abilities."""

    settings: tuple[str, ...] = ()
    """Settings that only this launcher acts on, such as `ray_address`; giving one chooses this launcher."""
    variables: tuple[str, ...] = ()
    """Environment variables that choose it, if no setting does and torchrun has not started the process."""
    spans_nodes: bool = False
    """Whether it starts the trainer's processes on every node itself, without torchrun."""
    restarts_trainer: bool = False
    """Whether it acts on `--max-trainer-restarts`."""
    restarts_engines: bool = False
    """Whether it restarts an engine whose process the launcher started (`--use-fault-tolerance`)."""


@dataclass(frozen=True)
class GenerateTraits(Traits):
    """Traits of a generate function."""

    uses_environment: bool = False
    """Whether its samples act in the environment of `--environment-path`."""
    takes_images: bool = False
    """Whether it passes `sample.image_data()` to the engine."""
    check: Callable[..., None] | None = None
    """Check `(args, *, training)` that raises ConfigError for unsupported settings, before anything starts."""


@dataclass(frozen=True)
class RolloutTraits(Traits):
    """Traits of a rollout function."""

    needs_engine: bool = True
    """Whether it needs an engine; if not, the launcher starts none."""
    replays: bool = False
    """Whether it may train on a group more than once."""
    leaves_out: bool = True
    """Whether it may leave drawn groups unaccounted for; if False, `slime ledger verify` requires every group."""
    records_evaluation: bool = False
    """Whether its evaluations are recorded sample by sample."""


@dataclass(frozen=True)
class RewardTraits(Traits):
    """Traits of a reward function, or of an instance of a reward class."""

    execution: Literal["inline", "thread", "process"] | None = None
    """Place where it runs (`plugins.adapters.EXECUTIONS`); None: the default for a function of its form."""
    scores_groups: bool = False
    """Whether its list of samples must be the whole group, because scores depend on each other."""
    extract_answer: Callable[[Sample], str | None] | None = None
    """Function from a sample to the answer in its response, for votes (`slime_data.answers`)."""
    check: Callable[..., None] | None = None
    """Check of the settings, as in `GenerateTraits.check`."""


@dataclass(frozen=True)
class EditTraits(Traits):
    """Traits of a dynamic filter, a buffer or a rollout hook, which handle samples before training."""

    edits_samples: bool = False
    """Whether it may change the samples' training data (`admission.Sealed`); if not, a change is an error."""


T = TypeVar("T", bound=Traits)
F = TypeVar("F", bound=Callable[..., Any])


def declares(traits: Traits) -> Callable[[F], F]:
    """Return a decorator that declares a function's traits: `@declares(RewardTraits(execution="thread"))`."""

    def declare(function: F) -> F:
        vars(function)["traits"] = traits
        return function

    return declare


def traits_of(component: object, kind: type[T], label: str = "") -> T:
    """Return the traits that a component (a class, an object or a function) declares, or the defaults.

    Raises:
        PluginError: The component declares traits of another kind, or has a trait as a plain attribute, which would be
            ignored. The message begins with `label`.
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
    """Return a component's class with its kind's full contract: missing members come from the base class."""
    own = {"__module__": found.__module__, "__doc__": found.__doc__}
    return found if issubclass(found, base) else type(found.__name__, (found, base), own)


def _written(component: object, kind: type[Traits], names: Sequence[str]) -> str:
    given = ", ".join(f"{name}={getattr(component, name)!r}" for name in names) or "..."
    of_class = isinstance(component, type) or not hasattr(component, "__name__")
    return f"traits = {kind.__name__}({given}) in its class" if of_class else f"@declares({kind.__name__}({given}))"
