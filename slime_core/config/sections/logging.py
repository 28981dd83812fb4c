"""Settings of metrics, trackers, debugging, profiling and continuous integration."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, NonNegativeFloat, PositiveInt
from pydantic_core import PydanticCustomError

from slime_core.config.sections.base import File, NoEffect, Refused, Rule, Section, Share, Switch
from slime_core.distributions import BUNDLE, installed
from slime_core.errors import ConfigError

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


def _all_none_or_number(value: str) -> str:
    if value not in ("all", "none") and not (value.isascii() and value.isdigit() and int(value) > 0):
        raise PydanticCustomError("how_many", "expected all, none, or how many samples of each rollout, such as 64")
    return value


ProfileTarget = Literal["train_overall", "train_actor", "train_log_probs"]


class LoggingArgs(Section):
    """Logging."""

    custom_rollout_log_function_path: str | None = None
    """fn(rollout_id, args, samples, extra_metrics, rollout_time); True skips the built-in metrics, and what is in
    extra_metrics is recorded."""
    custom_eval_rollout_log_function_path: str | None = None
    """fn(rollout_id, args, data, extra_metrics); True skips the built-in metrics, and what is in extra_metrics is
    recorded."""
    log_multi_turn: bool = False
    """Metrics of multi-turn samples: response lengths with and without tool output, rounds."""
    log_passrate: bool = False
    """pass@k of the training rollouts; reward 1 is correct."""
    log_reward_category: str | None = None
    """Count samples by this entry of the reward mapping."""
    log_correct_samples: bool = False
    """Metrics of the correct samples alone; reward 1 is correct."""
    log_samples: Annotated[str, AfterValidator(_all_none_or_number)] = "all"
    """Samples that a run keeps, per rollout and evaluation: all, none, or so many."""
    log_samples_budget: PositiveInt = 10_000_000_000
    """Bytes of kept samples; above it old rollouts keep their best, worst, failed and a few others, then none."""
    use_tensorboard: bool | None = None
    """Write TensorBoard event files; where tensorboard is installed when not given."""
    tb_project_name: File = None
    """Directory of TensorBoard event files."""
    tb_experiment_name: str | None = None
    """Name of the run in TensorBoard."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Mode of Weights & Biases."""
    wandb_dir: File = None
    """Directory of Weights & Biases files."""
    wandb_key: str | None = None
    """API key of Weights & Biases."""
    wandb_host: str | None = None
    """Server of Weights & Biases."""
    wandb_team: str | None = None
    """Team in Weights & Biases."""
    wandb_group: str | None = None
    """Group in Weights & Biases."""
    wandb_project: str | None = None
    """Project in Weights & Biases."""
    wandb_random_suffix: Switch = True
    """Add a random suffix to the name of the run."""
    wandb_always_use_train_step: bool = False
    """Use optimizer steps for all metrics."""
    wandb_run_id: str | None = None
    """Run to go on with."""


class DebugArgs(Section):
    """Debug and profile."""

    debug_rollout_only: bool = False
    """Generate, score, log and save samples without training; no trainer is built."""
    debug_train_only: bool = False
    """Start no engine; needs --load-debug-rollout-data, or a rollout function that generates nothing, such as sft."""
    save_debug_rollout_data: File = None
    """JSONL file for the samples of each rollout and evaluation; {rollout_id}, counted from 0, is filled in."""
    load_debug_rollout_data: File = None
    """Train on samples saved by --save-debug-rollout-data, without engine or data; {rollout_id} is filled in."""
    load_debug_rollout_data_subsample: Share | None = None
    """Part of the loaded groups to take: half of it from the head, half from the tail."""
    load_forge_rollout_data: File = None
    """Train on samples made by another tool."""
    save_debug_train_data: File = None
    """JSONL file for the train batch of each rollout, advantages included; {rollout_id} is filled in."""
    dump_details: File = None
    """Directory for samples and train batches of every rollout, and the tokenizer."""
    memory_snapshot_dir: str = "."
    """Directory of memory snapshots."""
    memory_snapshot_num_steps: PositiveInt | None = None
    """Steps recorded in a memory snapshot."""
    memory_recorder: Literal["torch", "memray"] = "torch"
    """What records memory."""
    record_memory_history: bool = False
    """Record memory allocations."""
    profile_target: list[ProfileTarget] = ["train_overall"]
    """What is profiled."""
    ci_test: bool = False
    """Checks for continuous integration."""
    ci_disable_kl_checker: bool = False
    """Leave out the check of the KL."""
    ci_train_rollout_logprob_abs_diff_threshold: NonNegativeFloat = 0.1
    """Largest distance of trainer and engine log-probs."""
    ci_save_grad_norm: File = None
    """File for gradient norms; {role}, {rollout_id} and {step_id} are filled in."""
    ci_load_grad_norm: File = None
    """File of gradient norms to compare with."""


_DUMPS = ("save_debug_rollout_data", "save_debug_train_data")
_TEMPLATES = ("load_debug_rollout_data", *_DUMPS, "save_hf")


def _half_a_loop(s: Settings) -> None:
    """A run may only generate, or only train on saved samples (`--load-debug-rollout-data`)."""
    a = s.args
    loads = a.load_debug_rollout_data is not None
    if loads and s.command not in ("train", "sft", "show"):
        raise ConfigError(f"{s.cite('load_debug_rollout_data')}: slime {s.command} does not train; use slime train.")
    if a.debug_rollout_only and s.command not in ("train", "rollout", "show"):
        raise ConfigError(f"{s.cite('debug_rollout_only')}: slime {s.command} has no rollouts; use slime train.")
    if loads and not a.debug_train_only:
        s.derive("debug_train_only", True, "load_debug_rollout_data")
    if loads:
        s.warnings.append(
            f"{s.cite('load_debug_rollout_data')}: nothing is generated, so settings of data, engine, rewards, filters,"
            " hooks of the rollout and evaluation have no effect."
        )


def _dumps(s: Settings) -> None:
    """Files of samples and train batches differ from each other, and from the files that are read."""
    a = s.args
    if a.dump_details is not None:
        for name, folder in zip(_DUMPS, ("rollout_data", "train_data")):
            if getattr(a, name) is None:
                s.derive(name, os.path.join(a.dump_details, folder, "{rollout_id}.jsonl"), "dump_details")
    if (s.command == "rollout" or a.debug_rollout_only) and a.save_debug_rollout_data is None:
        path = os.path.join(a.run_dir or "", "rollouts", "rollout_{rollout_id:07d}.jsonl")
        s.derive("save_debug_rollout_data", path, "run_dir")
    seen: dict[str, str] = {}
    for name in _TEMPLATES:
        template = getattr(a, name)
        if template is None:
            continue
        try:
            paths = {os.path.abspath(template.format(rollout_id=number)) for number in (0, 1)}
        except (AttributeError, LookupError, ValueError):
            raise ConfigError(f"{s.cite(name)}: the only placeholder is {{rollout_id}}") from None
        if name in _DUMPS and len(paths) == 1:
            raise ConfigError(f"{s.cite(name)}: rollouts would overwrite each other; put {{rollout_id}} into it")
        if name in _DUMPS and template.endswith(".pt"):
            s.warnings.append(f"{s.cite(name)}: the files hold JSON lines, whatever they are called.")
        if other := next((seen[path] for path in paths if path in seen), None):
            raise ConfigError(f"{s.cite(name)} and {s.cite(other)} are the same file; choose another name.")
        seen |= dict.fromkeys(paths, name)


def _by_plugins(s: Settings) -> None:
    """Settings that only hooks of the bundle read need the bundle."""
    extras = {"use_tensorboard": "[tensorboard]", "use_wandb": "[wandb]"}
    for name in (
        (*extras, "shadow_rm_path", "shadow_filter_path", "log_samples", "profile") if installed(BUNDLE) is None else ()
    ):
        if s.is_given(name) and getattr(s.args, name) not in (None, False, [], "none"):
            raise ConfigError(
                f"{s.cite(name)} needs a plugin that is missing; type: pip install 'slime-rl{extras.get(name, '')}'."
            )


RULES: tuple[Rule, ...] = (
    _by_plugins,
    Refused(
        lambda a: a.debug_train_only and a.load_debug_rollout_data is None and a.rollout_function_path is None,
        "{debug_train_only} needs --load-debug-rollout-data FILE, or a rollout function that needs no engine, such as"
        " --rollout-function-path sft: nothing is generated.",
    ),
    Refused(
        lambda a: a.load_debug_rollout_data_subsample is not None and a.load_debug_rollout_data is None,
        "{load_debug_rollout_data_subsample} needs --load-debug-rollout-data FILE.",
    ),
    Refused(
        lambda a: a.debug_rollout_only and a.load_debug_rollout_data is not None,
        "{debug_rollout_only} contradicts {load_debug_rollout_data}.",
    ),
    _half_a_loop,
    NoEffect(
        "load save_interval keep_checkpoints save_hf save_debug_train_data",
        lambda a: a.debug_rollout_only,
        "with --debug-rollout-only: nothing is trained",
    ),
    _dumps,
    NoEffect(
        "wandb_mode wandb_dir wandb_key wandb_host wandb_team wandb_group wandb_project wandb_random_suffix"
        " wandb_always_use_train_step wandb_run_id",
        lambda a: not a.use_wandb,
        "without --use-wandb",
    ),
)
