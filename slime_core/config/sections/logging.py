"""Settings of metrics, trackers, debugging, profiling and continuous integration."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from slime_core.config.sections.base import FILE, Flag, Section

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
    log_samples: Annotated[str, Field(pattern="^(all|none|[1-9][0-9]*)$")] = "all"
    """Samples that a run keeps in its directory, per rollout and evaluation: all, none, or so many."""
    log_samples_budget: Annotated[int, Field(gt=0)] = 10_000_000_000
    """Bytes of kept samples; above it old rollouts keep their best, worst, failed and a few others, then none."""
    use_tensorboard: bool | None = None
    """Write TensorBoard event files; where tensorboard is installed when not given."""
    tb_project_name: Annotated[str | None, FILE] = None
    """Directory of TensorBoard event files."""
    tb_experiment_name: str | None = None
    """Name of the run in TensorBoard."""
    use_wandb: bool = False
    """Log to Weights & Biases."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Mode of Weights & Biases."""
    wandb_dir: Annotated[str | None, FILE] = None
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
    wandb_random_suffix: Annotated[bool, Flag(off="--disable-wandb-random-suffix")] = True
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
    save_debug_rollout_data: Annotated[str | None, FILE] = None
    """JSONL file for the samples of each rollout and evaluation; {rollout_id} is filled in."""
    load_debug_rollout_data: Annotated[str | None, FILE] = None
    """Train on samples saved by --save-debug-rollout-data, without engine or data; {rollout_id} is filled in."""
    load_debug_rollout_data_subsample: Annotated[float | None, Field(gt=0, le=1)] = None
    """Part of the loaded groups to take: half of it from the head, half from the tail."""
    load_forge_rollout_data: Annotated[str | None, FILE] = None
    """Train on samples made by another tool."""
    save_debug_train_data: Annotated[str | None, FILE] = None
    """JSONL file for the train batch of each rollout, advantages included; {rollout_id} is filled in."""
    dump_details: Annotated[str | None, FILE] = None
    """Directory for samples and train batches of every rollout, and the tokenizer."""
    memory_snapshot_dir: str = "."
    """Directory of memory snapshots."""
    memory_snapshot_num_steps: Annotated[int | None, Field(gt=0)] = None
    """Steps recorded in a memory snapshot."""
    memory_recorder: Literal["torch", "memray"] = "torch"
    """What records memory."""
    record_memory_history: bool = False
    """Record memory allocations."""
    profile_target: list[ProfileTarget] = Field(default=["train_overall"])
    """What is profiled."""
    ci_test: bool = False
    """Checks for continuous integration."""
    ci_disable_kl_checker: bool = False
    """Leave out the check of the KL."""
    ci_train_rollout_logprob_abs_diff_threshold: Annotated[float, Field(ge=0)] = 0.1
    """Largest distance of trainer and engine log-probs."""
    ci_save_grad_norm: Annotated[str | None, FILE] = None
    """File for gradient norms; {role}, {rollout_id} and {step_id} are filled in."""
    ci_load_grad_norm: Annotated[str | None, FILE] = None
    """File of gradient norms to compare with."""
