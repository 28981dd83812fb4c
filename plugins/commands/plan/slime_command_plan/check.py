"""What `slime check` says of a run's memory: the estimate of `slime plan`, compared with this machine.

Loaded with every run, as all hook plugins are; it imports what it needs when it is asked.
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
    from slime_core.launch.findings import Finding

_OF_GPUS = ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus", "colocate", "launcher", "ray_address")
"""Settings of a run on other machines than this one, if this one has no GPU."""


@hookimpl
def slime_check(settings: Settings) -> list[Finding]:
    """The memory that it needs, of a run that learns."""
    return list(_memory(settings)) if settings.command in ("train", "sft") else []


def _memory(settings: Settings) -> Iterator[Finding]:
    """What the run plan needs on the fullest device, against what a device of this machine has."""
    import torch

    from slime_command_plan.memory import shown, total
    from slime_command_plan.run_plan import plan_run
    from slime_core.launch.findings import Finding, Level

    args, gpus = settings.args, torch.cuda.device_count() if settings.args.device != "cpu" else 0
    if not gpus and args.device != "cpu" and any(map(settings.is_given, _OF_GPUS)):
        yield Finding("memory", Level.NOTE, "this machine has no GPU to compare with; slime plan says what each needs")
        return
    try:
        plan = plan_run(settings, num_gpus=gpus)
    except SlimeError as error:
        yield Finding("memory", Level.NOTE, f"no estimate: {error}")
        return
    if not plan.memory:
        return
    has = float(torch.cuda.get_device_properties(0).total_memory if gpus else _main_memory())
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


def _main_memory() -> int:
    """Bytes, by the machine or by the limit of this process's control group."""
    machine, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine
