"""Settings of the run as a whole: which parts, where it writes, which plugins, on what device."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import PositiveInt

from slime_core.config.sections.base import Exclusive, File, Flag, Refused, Rule, Section, Seed, Spec
from slime_core.files import RUN_FILES

if TYPE_CHECKING:
    from slime_core.config.settings import Settings


class RunArgs(Section):
    """Run."""

    config: Annotated[list[str], Flag(append=True, paths=True, metavar="FILE")] = []
    """YAML file with settings, one per line, named as the flags; repeatable, later files win."""
    run_dir: File = None
    """Directory for config.yaml, metrics.jsonl and summary.json; when not given, --save, or outputs/COMMAND, or
    outputs/COMMAND-2 and so on where that holds a run."""
    overwrite: bool = False
    """Replace the run that the run directory holds, once the new one has its first record; until then it stays."""
    prepare_path: str | None = None
    """Recipe that creates missing inputs (model, data) before the run: a name, or a path to a function(args)."""
    preflight: Annotated[bool, Flag(off="no")] = True
    """Before the run, try every component in a fresh process and look at data, tokenizer, paths and disk space."""
    trace: Annotated[bool, Flag(off="no")] = True
    """Record when each sample and step began and ended, in trace.jsonl of the run directory, for slime plan --trace."""
    profile: bool = False
    """Say at the end where the time went, and write it for Perfetto, into profile/trace.json of the run directory."""
    plugin_dir: Annotated[list[str], Flag(append=True, paths=True, metavar="DIR", holds="path")] = []
    """Directory searched for plugin distributions that are not installed; repeatable."""
    no_plugins: bool = False
    """Safe mode: slime's own plugins only; no other hook plugin or component, no plugin directory."""
    plugins: Annotated[dict[str, dict[str, Any]], Flag(holds="marked")] = {}
    """Options of plugins, {name: {option: value}}; from YAML, or one at a time by --set plugins.NAME.OPTION=VALUE."""
    custom_config_path: File = None
    """YAML file; keys that are settings are settings, all others become attributes of args for your functions."""
    train_backend: Spec = "auto"
    """Trainer, by plugin name. auto: megatron where one of Megatron's flags or GPUs for training are given, else
    embedded."""
    rollout_engine: Spec = "auto"
    """Rollout engine, by plugin name. auto: sglang where one of SGLang's flags or GPUs for inference are given, else
    embedded."""
    launcher: Spec = "auto"
    """Where the stages live, by plugin name. inline: in this process, and further trainer processes of this machine;
    ray: in actors of a Ray cluster; auto: the one that is named otherwise, ray by --ray-address, by the environment
    variable RAY_ADDRESS and in a Ray job, else inline."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and engine; auto takes CUDA when there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of trainer and engine; auto takes bfloat16 on CUDA and float32 on CPU."""
    kernels: Literal["auto", "torch"] = "auto"
    """What computes float32 on CPUs in the embedded trainer and engine. auto: functions in C where a compiler is there
    and the process has one thread (--num-threads 1), which differ from torch in the last bits; torch: torch alone."""
    model_impl: Literal["auto", "slime", "transformers"] = "auto"
    """Code of the model in the embedded trainer and engine. slime: slime's own decoder; transformers: the model's class
    in transformers; auto: transformers for families that slime has no decoder for."""
    bf16: bool = False
    """Same as --dtype bfloat16."""
    fp16: bool = False
    """Half precision."""
    deterministic_mode: bool = True
    """An engine in this process steps only while no reward or tool runs, so that results do not depend on timing."""
    true_on_policy_mode: bool = False
    """Trainer and engine compute the same log-probs bit for bit, which every rollout is checked for; slower."""
    num_threads: PositiveInt | None = None
    """CPU threads of this process; torch's choice when not given. A run repeats bit for bit with the same number."""
    seed: Seed = 1234
    """Seed of initialisation, dropout and the trainer."""


def _dtype(s: Settings) -> None:
    """`--bf16` is `--dtype bfloat16`; log-probs that are equal bit for bit are float32."""
    if s.args.bf16 and not s.is_given("dtype"):
        s.derive("dtype", "bfloat16", "bf16")
    if s.args.true_on_policy_mode and s.args.dtype == "auto":
        s.derive("dtype", "float32", "true_on_policy_mode")


def _run_directory(s: Settings) -> None:
    """Metrics and summary go beside the checkpoints.

    Commands that train nothing save no checkpoint: a run file's --save and --overwrite are for its training run.
    """
    if s.command in ("eval", "rollout"):
        if s.args.run_dir is None and s.origins["save"].kind == "flag":
            s.derive("run_dir", s.args.save, "save")
        for name, value in (("save", None), ("overwrite", False)):
            if getattr(s.args, name) and (name == "save" or s.origins[name].kind != "flag"):
                s.derive(name, value, f"slime {s.command}")
    if s.args.run_dir is None and s.args.save is not None:
        s.derive("run_dir", s.args.save, "save")
    elif s.args.run_dir is None and s.command not in ("show", "serve"):
        s.derive("run_dir", _free_directory(s, os.path.join("outputs", s.command)), f"slime {s.command}")


def _free_directory(s: Settings, default: str) -> str:
    """Return the default directory, or `default-2` and so on where a run is.

    The processes of one run settle on one directory, so those of torchrun take the default.
    """
    names = itertools.chain([default], (f"{default}-{number}" for number in itertools.count(2)))
    if s.args.load or s.args.overwrite or "WORLD_SIZE" in os.environ:
        return default
    free = next(name for name in names if not any(os.path.exists(os.path.join(name, own)) for own in RUN_FILES))
    if free != default:
        s.warnings.append(f"{default} holds a run, so this one goes to {free} (--run-dir names another directory).")
    return free


RULES: tuple[Rule, ...] = (
    Refused(lambda a: a.bf16 and a.dtype == "float32", "{bf16} contradicts {dtype}; remove one."),
    _dtype,
    Refused(
        lambda a: a.true_on_policy_mode and a.dtype == "bfloat16",
        "{true_on_policy_mode} needs float32: remove {dtype}.",
    ),
    Exclusive(
        "true_on_policy_mode",
        "partial_rollout use_tis",
        "exclude each other: one says that all tokens come from the weights being trained, the other that some do not",
    ),
    _run_directory,
    Refused(lambda a: a.profile and not a.trace, "{profile} is made of what {trace} leaves out; remove one."),
)
