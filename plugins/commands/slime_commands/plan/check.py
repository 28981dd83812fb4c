"""Findings before a run: settings that rarely learn, processes that this machine has no room for, memory.

`slime check` prints all, the run itself logs warnings and stops at errors of all but the estimate of `slime plan`.
Loaded with every run, as all hook plugins are; functions import what they need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import hookimpl
from slime_core.errors import SlimeError

if TYPE_CHECKING:
    from slime_core.config import Settings
    from slime_core.launch.prepare import Prepared
    from slime_core.protocols.command import Finding

_LARGEST_KL = 1.0
_TINY = 10e6
"""Parameters of a model of which any number of processes may share a core."""
_STATES = 16
"""Bytes a parameter: float32 weights, gradients and both moments."""


@hookimpl
def slime_preflight(run: Prepared) -> list[Finding]:
    """Report settings that the model's size speaks against, and processes beyond cores and memory."""
    from slime_commands.plan.memory import Parameters

    if run.settings.command not in ("train", "sft") or run.args.debug_rollout_only:
        return []
    try:
        parameters = Parameters.of_directory(Path(run.args.hf_checkpoint)).total
    except (OSError, ValueError):  # other checks name the file
        parameters = 0
    return [*_processes(run, parameters), *choices(run.settings, parameters)]


@hookimpl
def slime_check(settings: Settings) -> list[Finding]:
    """Compare the memory that a run needs with what this machine has."""
    return list(_memory(settings)) if settings.command in ("train", "sft") else []


def _processes(run: Prepared, parameters: int) -> Iterator[Finding]:
    """Trainer processes on this machine's CPU need a core each, and the embedded trainer's a copy of the model."""
    import torch
    from slime_embedded.trainer.settings import main_memory

    from slime_commands.plan.choices import in_words
    from slime_commands.plan.memory import shown
    from slime_core.launch.launchers import launcher_traits
    from slime_core.protocols import TrainerTraits, traits_of
    from slime_core.protocols.command import Finding, Level

    args, cores, has = run.args, len(os.sched_getaffinity(0)), main_memory()
    count = int(os.environ.get("LOCAL_WORLD_SIZE", run.processes))
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    if count < 2 or on_gpu or launcher_traits(run.settings).spans_nodes:
        return
    divides = traits_of(run.parts.trainer, TrainerTraits).collective_weights
    needs = 0 if divides else count * parameters * (_STATES if args.lora_rank is None else _STATES / 4)
    if parameters > _TINY and (count > cores or needs > has):
        copies = "" if divides else f", each with the whole model of {in_words(parameters)} parameters"
        yield Finding(
            "processes",
            Level.ERROR,
            f"{run.settings.cite('actor_num_gpus_per_node')}: {count} trainer processes{copies}, on this machine's CPU:"
            f" {cores} cores, {shown(has)}{f', of which they need {shown(needs)}' if needs else ''}; type"
            " --actor-num-gpus-per-node 1, which uses all cores",
        )
    elif count > cores:
        text = f"{count} trainer processes share {cores} cores; --actor-num-gpus-per-node 1 is faster"
        yield Finding("processes", Level.NOTE, text)


def choices(settings: Settings, parameters: int) -> Iterator[Finding]:
    """Yield warnings about settings with which runs rarely learn (docs/how-to/choose-settings.md)."""
    from slime_commands.plan.choices import COLD, HOT, complaint
    from slime_core.protocols.command import Finding, Level

    args, page = settings.args, "see docs/how-to/choose-settings.md"
    lora = args.lora_rank is not None
    if parameters and (why := complaint(args.lr, parameters, lora=lora, small=settings.command == "train")):
        yield Finding("settings", Level.WARNING, f"{settings.cite('lr')}: {why}")
    steps = (args.num_rollout or 0) * (args.num_steps_per_rollout or 1)
    if 0 < steps < args.lr_warmup_iters:
        text = f"{settings.cite('lr_warmup_iters')}: the run has {steps} steps, so its learning rate never reaches"
        yield Finding("settings", Level.WARNING, f"{text} {args.lr:g} ({page})")
    if settings.command == "sft" or args.loss_type != "policy_loss":
        return
    if not COLD <= args.rollout_temperature <= HOT:
        alike = "the answers of a group are alike" if args.rollout_temperature < COLD else "answers are noise"
        text = f"{settings.cite('rollout_temperature')}: {alike}; 0.7 to 1.0 is usual ({page})"
        yield Finding("settings", Level.WARNING, text)
    if args.eps_clip == 0:
        yield Finding(
            "settings", Level.WARNING, f"{settings.cite('eps_clip')}: clips every change; 0.2 is usual ({page})"
        )
    for name, on in (("kl_loss_coef", args.use_kl_loss), ("kl_coef", True)):
        if on and getattr(args, name) > _LARGEST_KL:
            text = f"{settings.cite(name)}: holds the policy where it is; 0.001 to 0.05 is usual ({page})"
            yield Finding("settings", Level.WARNING, text)


def _memory(settings: Settings) -> Iterator[Finding]:
    """Compare the fullest device of the run plan with a device of this machine."""
    import torch
    from slime_embedded.trainer.settings import main_memory

    from slime_commands.plan.memory import shown, total
    from slime_commands.plan.run_plan import plan_run
    from slime_core.launch.launchers import launcher_traits
    from slime_core.protocols.command import Finding, Level

    args, gpus = settings.args, torch.cuda.device_count() if settings.args.device != "cpu" else 0
    if not gpus and args.device != "cpu" and launcher_traits(settings).spans_nodes:
        yield Finding("memory", Level.NOTE, "this machine has no GPU to compare with; slime plan says what each needs")
        return
    try:
        plan = plan_run(settings, num_gpus=gpus)
    except SlimeError as error:
        yield Finding("memory", Level.NOTE, f"no estimate: {error}")
        return
    if not plan.memory:
        return
    has = float(torch.cuda.get_device_properties(0).total_memory if gpus else main_memory())
    ranks = 1 if gpus else len(plan.placement.trainers)
    fullest = max(plan.memory, key=lambda device: device.total)
    trainer = plan.memory[0]
    more = (ranks - 1) * trainer.total if trainer.device.startswith("trainer") else 0.0
    needs, held = fullest.total + more, ranks * total([item for item in trainer.items if item.idle])
    where = "a GPU of this machine" if gpus else "this machine"
    text = f"about {shown(needs)} of the {shown(has)} of {where} (within a factor of 2; slime plan says for what)"
    if held > has:
        lora = "; --lora-rank N trains adapters alone" if args.lora_rank is None else ""
        text = f"weights, gradients and optimizer alone take {shown(held)}, and {where} has {shown(has)}{lora}"
        yield Finding("memory", Level.ERROR, text)
    else:
        yield Finding("memory", Level.WARNING if needs > has else Level.OK, text)
