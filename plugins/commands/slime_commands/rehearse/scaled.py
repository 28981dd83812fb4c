"""Settings of a run -> settings of its rehearsal: few processes, samples and tokens, and a directory of its own.

`settings_here` replaces what this machine does not have: GPUs, nodes, servers, the checkpoint. `settings_small` makes
numbers small besides. All other settings stay as they are.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_trainer_megatron.arguments.architecture import COMPARED
from slime_trainer_megatron.arguments.flags import shown
from slime_trainer_megatron.arguments.owned import REFUSED_ON_CPU
from slime_trainer_megatron.layout import Layout

from slime_core.config import Settings
from slime_core.config.foreign import find_foreign, find_owners
from slime_core.config.load import WITHOUT_FLAGS
from slime_core.config.sections.evaluation import EvalDataset
from slime_core.config.spec import flag_specs
from slime_core.config.support import BY_COMPONENT, OF_TRAINERS
from slime_core.config.yaml_file import dump_value
from slime_core.data.dataset import split_path
from slime_core.errors import ConfigError
from slime_core.plugins.presets import load_settings
from slime_core.protocols import Args, EngineTraits, TrainerTraits, traits_of

TOKENS = 16
"""Largest number of tokens of a response."""
SAMPLES = 4
"""Largest number of samples of a prompt."""
ROWS = 4
"""Rows of each evaluation data set."""
_NEVER = ("config", "custom_config_path", "prepare_path", "model", "load", "ckpt_step", "overwrite", "resume")
_OF_CLUSTER = (
    "ray_address", "colocate", "offload", "offload_train", "offload_rollout", "rollout_num_gpus", "num_gpus_per_node",
    "rollout_num_gpus_per_engine", "actor_num_nodes", "actor_num_gpus_per_node", "bf16", "use_fault_tolerance",
    "max_trainer_restarts", "distributed_backend", "kernels", "train_env_vars", "http_proxy",
)  # fmt: skip
"""Settings of the machines that the run has and the rehearsal has not."""
MODELS = ("ref_load", "critic_load", "opd_teacher_load", "initial_megatron_checkpoint")
"""Settings that name further models."""
_STEPS = ("ref_ckpt_step", "opd_teacher_ckpt_step")
_OF_STAGES = (
    "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "microbatch_group_size_per_vp_stage",
)  # fmt: skip
_OF_MODEL = (
    *COMPARED, "swiglu", "untie_embeddings_and_output_weights", "vocab_size", "moe_layer_freq", "num_moe_experts",
    "moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size", "moe_router_num_groups",
    "moe_router_group_topk", "make_vocab_size_divisible_by", "padded_vocab_size", "max_position_embeddings",
    "seq_length",
)  # fmt: skip
"""Flags that state the architecture, or follow from its sizes."""
_OF_SERVERS = ("sglang_config", "prefill_num_servers", "sglang_router_ip", "sglang_router_port")
"""Settings of several servers, and of a router that runs already."""
_ON_CPU = (
    "sglang_context_length", "sglang_max_running_requests", "sglang_reasoning_parser", "sglang_tool_call_parser",
    "sglang_stream_interval", "vllm_max_model_len", "vllm_max_num_seqs", "vllm_stream_interval", "vllm_hf_overrides",
    "vllm_enable_prefix_caching",
)  # fmt: skip
"""Flags of engines that mean the same on a CPU."""
_TRACKERS = ("use_wandb", "use_tensorboard")
_OUTPUT = ("save_debug_rollout_data", "save_debug_train_data", "save_hf", "dump_details", "ci_save_grad_norm")
_AT_MOST: Mapping[str, float] = {
    "rollout_timeout": 60, "rm_timeout": 20, "environment_step_timeout": 10, "user_code_timeout": 60,
    "train_timeout": 120, "weight_push_timeout": 60, "save_timeout": 60, "eval_timeout": 60, "rollout_stop_timeout": 10,
    "distributed_timeout_minutes": 2, "drain_timeout": 60, "max_consecutive_failures": 16,
    "dynamic_sampling_budget": 4, "engine_max_running_requests": 16, "update_weights_interval": 2, "rm_workers": 1,
    "num_critic_only_steps": 1, "rollout_max_response_len": TOKENS,
}  # fmt: skip
"""Setting -> its largest value in a rehearsal."""
DEADLINES = ("rollout_timeout", "rm_timeout", "environment_step_timeout", "user_code_timeout")


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    command: str = "train"
    num_gpus: int | None = None
    processes: int = 4
    """Largest number of trainer processes."""
    seconds: float | None = None
    """Seconds for each start of the small run; None: by the number of processes."""
    stand_ins: bool = False
    until: str = "resume"
    """Last stage."""


def given(settings: Settings) -> dict[str, Any]:
    """Return the values that a source gave, with absolute paths; derived values and defaults are left out."""
    cwd, values = os.getcwd(), dict[str, Any]()
    for name, spec in flag_specs().items():
        if settings.origins[name].kind not in ("default", "derived") and name not in _NEVER:
            values[name] = spec.located(getattr(settings.args, name), cwd)
    for name in settings.foreign:
        if settings.origins[name].kind not in ("derived", "preset"):
            values[name] = getattr(settings.args, name)
    if settings.custom:
        values["custom"] = {name: getattr(settings.args, name) for name in settings.custom}
    return values


@dataclass(frozen=True)
class RunFile:
    """A file with settings of a rehearsal, one a line, whose messages name the user's own places."""

    path: Path
    names: tuple[str, ...]
    command: str

    @classmethod
    def write(cls, path: Path, values: Mapping[str, Any], command: str) -> RunFile:
        """Write the file, readable by this user only, since values may be secret."""
        lines = [f"{name}: {dump_value(value)}\n" for name, value in values.items() if value is not None]
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.writelines(lines)
        return cls(path, tuple(name for name, value in values.items() if value is not None), command)

    def load(self) -> Settings:
        """Read the settings back, without the environment's. Raises ConfigError and PluginError."""
        return load_settings(["--config", str(self.path)], command=self.command, env={})

    def in_words_of(self, settings: Settings, text: str) -> str:
        """Return a message with the user's origins in place of lines of this file."""

        def origin(match: re.Match[str]) -> str:
            name = self.names[int(match[1]) - 1]
            known = settings.origins.get(name)
            return "in a rehearsal" if known is None or known.kind == "default" else str(known)

        return re.sub(re.escape(str(self.path)) + r":(\d+)", origin, text)


@dataclass
class Here:
    """Values of a run on this machine's CPU."""

    values: dict[str, Any]
    stages: int = 1
    """Pipeline stages."""
    data_parallel: int = 1
    processes: int = 1
    servers: int = 0
    """Servers of the engine."""
    layout: str = ""
    """Parallel sizes in words; empty for one process."""
    gaps: list[str] = field(default_factory=list)
    """Parts that are left out, with the reason."""


def settings_here(settings: Settings, trainer: Any, engine: Any, most: int) -> Here:
    """Return values that this machine can run.

    Args:
        settings: The run's settings.
        trainer: Class of the trainer; None for a run that does not train.
        engine: Class of the engine; None for a run that does not generate.
        most: Largest number of trainer processes.
    """
    args = settings.args
    here = Here(given(settings))
    values = here.values
    for name in _OF_CLUSTER:
        values.pop(name, None)
    values |= {"launcher": "inline", "device": "cpu", "dtype": "float32"}
    if args.dtype == "bfloat16" or args.bf16:
        here.gaps.append("bfloat16: the rehearsal computes in float32")
    if args.launcher not in ("auto", "inline"):
        here.gaps.append(f"--launcher {args.launcher}: its actors, places and nodes")
    here.gaps += [f"{flag_specs()[name].flag}: trackers are off" for name in _TRACKERS if values.get(name)]
    if trainer is not None:
        _place_trainer(settings, trainer, here, most)
    if engine is not None:
        _place_engine(settings, engine, here)
    return here


def _place_trainer(settings: Settings, trainer: Any, here: Here, most: int) -> None:
    lacking = trainer.missing(settings.args) if hasattr(trainer, "missing") else ""
    traits = traits_of(trainer, TrainerTraits)
    if lacking:
        here.gaps.append(f"--train-backend {settings.args.train_backend}: {lacking}")
        here.values["train_backend"] = WITHOUT_FLAGS
        _leave_out(here, "train_backend")
        return
    if traits.reads_megatron:
        _place_layout(settings, trainer, here, most)
        return
    asked = settings.args.actor_num_nodes * settings.args.actor_num_gpus_per_node
    count = min(2, most, asked) if settings.is_given("actor_num_gpus_per_node") else 1
    if count > 1:
        here.values["actor_num_gpus_per_node"] = here.processes = here.data_parallel = count
        here.layout = f"{count} data-parallel processes for {asked}"


def _place_layout(settings: Settings, trainer: Any, here: Here, most: int) -> None:
    asked = Layout.from_args(settings.args)
    world = trainer.processes(settings) or asked.model_size
    sizes = {"tensor": min(2, asked.tensor), "pipeline": min(2, asked.pipeline), "context": min(2, asked.context)}
    for name in ("context", "pipeline", "tensor"):
        if sizes["tensor"] * sizes["pipeline"] * sizes["context"] > most:
            here.gaps.append(f"{name} parallelism of {getattr(asked, name)}: more than {most} processes; --processes N")
            sizes[name] = 1
    one = sizes["tensor"] * sizes["pipeline"] * sizes["context"]
    expert_tensor = min(2, asked.expert_tensor or asked.tensor, sizes["tensor"])
    expert = min(2, asked.expert)
    data = 2 if (world > asked.model_size or expert > 1) and 2 * one <= most else 1
    if one * data % (expert_tensor * expert * sizes["pipeline"]):
        here.gaps.append(f"expert parallelism of {asked.expert}: more than {most} processes; --processes N")
        expert = 1
    if asked.virtual or any(name in here.values for name in _OF_STAGES):
        here.gaps.append("uneven or interleaved pipeline stages: checked by their numbers only")
    for name in _OF_STAGES:
        here.values.pop(name, None)
    for name, (value, why) in REFUSED_ON_CPU.items():
        if settings.args.device != "cpu" and here.values.get(name, value) != value:
            here.gaps.append(f"{shown(name, here.values.pop(name))}: {why}")
    here.values |= {f"{name}_model_parallel_size": sizes[name] for name in ("tensor", "pipeline")}
    here.values |= {"context_parallel_size": sizes["context"], "expert_model_parallel_size": expert}
    if asked.expert_tensor is not None:
        here.values["expert_tensor_parallel_size"] = expert_tensor
    here.processes, here.data_parallel, here.stages = one * data, data, sizes["pipeline"]
    here.values["actor_num_gpus_per_node"] = here.processes
    each = [f"TP {sizes['tensor']}/{asked.tensor}", f"PP {sizes['pipeline']}/{asked.pipeline}"]
    each += [f"CP {sizes['context']}/{asked.context}", f"EP {expert}/{asked.expert}"]
    here.layout = f"{here.processes} of {world} processes: {', '.join(each)}, DP {data}/{world // asked.model_size}"


def _place_engine(settings: Settings, engine: Any, here: Here) -> None:
    """Let the engine start one server on this CPU, or leave it out."""
    if not (hasattr(engine, "launch_plan") or traits_of(engine, EngineTraits).runs_elsewhere):
        return
    args, values = settings.args, here.values
    if not hasattr(engine, "missing") or args.rollout_external_engine_addrs:
        leave_out_servers(settings, here, "its servers run elsewhere")
        return
    own, beside = _missing(engine, args), ""
    if own and args.engine_python:
        beside = _missing(engine, args.model_copy(update={"engine_python": None}))
        values.pop("engine_python", None)
    if own and (beside or not args.engine_python):
        leave_out_servers(settings, here, own)
        return
    values |= {"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 1}
    here.servers = 1
    here.gaps.append(f"--rollout-engine {args.rollout_engine}: one server of one process, on this CPU")
    left = [flag_specs()[name].flag for name in _OF_SERVERS if values.pop(name, None) is not None]
    left += _leave_out(here, "rollout_engine", kept=_ON_CPU)
    if left:
        here.gaps.append(f"not on a CPU, so checked only: {', '.join(left)}")


def _missing(engine: Any, args: Args) -> str:
    """Return the reason why the engine's program cannot run here; empty if it can."""
    try:
        return str(engine.missing(args))
    except ConfigError as error:
        return str(error)


def leave_out_servers(settings: Settings, here: Here, reason: str) -> None:
    """Let the embedded engine take the place of the run's engine."""
    name = settings.args.rollout_engine
    here.gaps.append(f"--rollout-engine {name}: {reason}; the embedded engine takes its place, flags were checked")
    here.servers = 0
    here.values["rollout_engine"] = WITHOUT_FLAGS
    _leave_out(here, "rollout_engine")
    others = BY_COMPONENT.keys() - OF_TRAINERS.keys()
    for setting in (*others, "engine_python", "sglang_router_ip", "sglang_router_port"):
        if setting not in ("actor_num_gpus_per_node", "actor_num_nodes"):
            here.values.pop(setting, None)
    for setting in [setting for setting in here.values if setting.startswith("update_weight_")]:
        del here.values[setting]


def _leave_out(here: Here, chooses: str, kept: Collection[str] = ()) -> list[str]:
    """Remove the pass-through flags of a backend that the rehearsal does not have, and return them."""
    owners, _ = find_owners([], {})
    left = []
    for name in [name for name in here.values if name not in flag_specs() and name not in ("custom", *kept)]:
        owner = find_foreign(owners, name)
        # Flags that choose no component, as vLLM's, are an engine's.
        if owner is not None and (owner.chooses or "rollout_engine") == chooses:
            del here.values[name]
            left.append(f"--{name.replace('_', '-')}")
    return left


def with_model(here: Here, directory: Path, *, small: bool) -> None:
    """Name the rehearsal's model; of a small one, leave out flags that state the architecture."""
    here.values["hf_checkpoint"] = str(directory.absolute())
    for name in MODELS:
        if here.values.get(name):
            here.values[name] = str(directory.absolute())
    here.values["plugins"] = copy.deepcopy(here.values.get("plugins", {}))
    for teacher in here.values["plugins"].get("on_policy_distillation", {}).get("teachers", {}).values():
        if teacher.get("path"):
            teacher["path"] = str(directory.absolute())
    for name in (*_STEPS, *(_OF_MODEL if small else ())):
        here.values.pop(name, None)


def settings_small(settings: Settings, here: Here, folder: Path) -> dict[str, Any]:
    """Return the values of the run that is rehearsed: few short samples, and output in the folder."""
    args, values = settings.args, dict(here.values)
    samples = min(SAMPLES, args.n_samples_per_prompt)
    steps = min(2, args.num_steps_per_rollout or 1)
    parts = steps * here.data_parallel
    prompts = next(count for count in range(2, 2 + 2 * parts) if count * samples % parts == 0)
    for name in (*_OUTPUT, "num_steps_per_rollout", "num_epoch", "run_dir", "eval_prompt_data", "eval_config"):
        values.pop(name, None)
    for name in [name for name in values if name.startswith(("wandb_", "tb_", "use_wandb", "use_tensorboard", "ci_"))]:
        del values[name]
    values |= {
        "rollout_batch_size": prompts, "n_samples_per_prompt": samples, "global_batch_size": prompts * samples // steps,
        "num_rollout": max(SAMPLES, args.num_rollout or 0), "save": str(folder / "run"), "save_interval": 1,
        "keep_checkpoints": 2, "preflight": False, "num_threads": 1, "log_samples": "all",
    }  # fmt: skip
    if settings.is_given("over_sampling_batch_size"):
        values["over_sampling_batch_size"] = prompts + int(args.over_sampling_batch_size > args.rollout_batch_size)
    if values.get("micro_batch_size"):
        values["micro_batch_size"] = min(values["micro_batch_size"], prompts * samples // parts)
    if args.dynamic_sampling_filter_path:
        values["dynamic_sampling_on_exhausted"] = "keep"
    for name, most in _AT_MOST.items():
        known = getattr(args, name)
        if known is None or known > most:
            values[name] = most
    if values.get("log_probs_chunk_size", -1) == -1:
        values["log_probs_chunk_size"] = 128
    if args.save_hf:
        values["save_hf"] = str(folder / "exports" / "{rollout_id}")
    for name in ("update_weight_disk_dir", "update_weight_local_checkpoint_dir"):
        if values.get(name):
            values[name] = str(folder / name)
    return values | _evaluation(args, folder)


def _evaluation(args: Args, folder: Path) -> dict[str, Any]:
    """Write small evaluation data sets, and return the settings that name them."""
    if not args.eval_datasets:
        return {}
    path = folder / "evaluation.yaml"
    sets = ", ".join(dump_value(_small_set(dataset)) for dataset in args.eval_datasets)
    path.write_text(f"eval:\n  datasets: [{sets}]\n", encoding="utf-8")
    return {
        "eval_config": str(path), "eval_interval": 1 if args.eval_interval else None, "eval_max_response_len": None
    }  # fmt: skip


def _small_set(dataset: EvalDataset) -> dict[str, Any]:
    entry = {name: value for name, value in dataset.model_dump().items() if value is not None and name != "ks"}
    path, rows = split_path(dataset.path)
    start = rows.start or 0
    stop = start + ROWS if rows.stop is None or start < 0 or rows.stop > start + ROWS else rows.stop
    entry["path"] = f"{os.path.abspath(path)}@[{start}:{stop if stop else ''}]"
    entry["max_response_len"] = min(TOKENS, dataset.max_response_len or TOKENS)
    return {**entry, "n_samples_per_eval_prompt": 1}


def trackers(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of plugins that may write elsewhere, which a rehearsal leaves as they are."""
    for plugin, options in values.get("plugins", {}).items():
        for option, value in options.items():
            if isinstance(value, str) and re.search(r"(dir|path|uri|url)$", option):
                yield f"plugins.{plugin}.{option} = {value}"


def check_sizes(settings: Settings, trainer: Any, config_directory: Path) -> None:
    """Compare the run's own layout with the run's own model. Raises ConfigError."""
    args = settings.args
    held = args.hf_checkpoint, args.device, args.opd_teacher_load
    args.hf_checkpoint, args.device = str(config_directory), "cuda"
    args.opd_teacher_load = None  # another of its size takes its place
    try:
        if traits_of(trainer, TrainerTraits).reads_megatron:
            if not (hasattr(trainer, "missing") and trainer.missing(args)):
                trainer.check_settings(settings)
            trainer.processes(settings)
    finally:
        args.hf_checkpoint, args.device, args.opd_teacher_load = held
