"""Settings -> everything `slime plan` prints about a run that has not started: batches, schedule, placement, memory.

Loads the trainer's and the engine's class, to ask them for their processes and servers, and no model. It plans the
cluster that is described (`num_gpus`), which need not be this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime_launcher_ray.placement import Placement, engines_of, plan_placement, settle_trainer
from slime_trainer_megatron.families import shape as megatron_families
from slime_trainer_megatron.layout import Layout

from slime_command_plan.batch import BatchPlan, longest_sample, plan_batches, schedule_in_words
from slime_command_plan.memory import (
    FACTOR,
    Item,
    Parameters,
    Sharding,
    engine_items,
    phase_items,
    shown,
    total,
    trainer_items,
)
from slime_core.config import Settings
from slime_core.data.dataset import open_rows
from slime_core.errors import SlimeError
from slime_core.launch.resolver import Resolver
from slime_core.models.family import decoder_shape
from slime_core.protocols import Args, EngineTraits, RolloutTraits, TrainerTraits, traits_of


@dataclass(frozen=True)
class DeviceMemory:
    """What one device, or process on CPU, needs."""

    device: str
    """Which ones, in words."""
    items: list[Item]
    phases: bool = False
    """The items are phases, one after the other, and not parts."""

    @property
    def total(self) -> float:
        """Bytes; of phases the most."""
        return max(item.bytes for item in self.items) if self.phases else total(self.items)

    @property
    def peak(self) -> str:
        """The phase that needs the most; empty where there is one only."""
        return max(self.items, key=lambda item: item.bytes).name if self.phases and len(self.items) > 1 else ""


@dataclass(frozen=True)
class RunPlan:
    """What a run would be."""

    batches: BatchPlan | None
    schedule: list[str]
    placement: Placement
    memory: list[DeviceMemory]
    notes: list[str] = field(default_factory=list)
    """What could not be told, and why."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "batches": self.batches.to_dict() if self.batches else None,
            "schedule": self.schedule,
            "placement": self.placement.to_dict(),
            "memory": [
                {"device": m.device, "bytes": m.total, "peak": m.peak, "items": [asdict(i) for i in m.items]}
                for m in self.memory
            ],
            "notes": self.notes,
        }

    def describe(self, device_bytes: float | None = None) -> Iterator[str]:
        """Lines for people; with `device_bytes` memory is compared with what a device has."""
        yield "batches"
        for line in self.batches.describe() if self.batches else []:
            yield f"  {line}"
        yield from ("", "schedule", *(f"  {line}" for line in self.schedule))
        yield from ("", "placement", *(f"  {line}" for line in self.placement.describe().splitlines()))
        if self.memory:
            yield from ("", f"memory (above what libraries take; measured peaks lie within {FACTOR:g}x)")
        for device in self.memory:
            when = f", while it is to {device.peak}" if device.peak else ""
            yield f"  {device.device}: {shown(device.total)}{when}{_of(device.total, device_bytes)}"
            width = max(len(item.name) for item in device.items)
            for item in device.items:
                yield f"    {item.name:<{width}}  {shown(item.bytes):>9}  {item.how}"
        for note in self.notes:
            yield from ("", f"note: {note}")


def plan_run(settings: Settings, *, num_gpus: int, num_cpus: float | None = None) -> RunPlan:
    """Plan a training run.

    Args:
        settings: Of `slime train` or `slime sft`.
        num_gpus: GPUs of the cluster; 0 is one without.
        num_cpus: CPUs of the cluster; None: enough.

    Raises:
        ConfigError: There can be no such run.
        PluginError: Trainer or engine cannot be loaded.
    """
    args, gpus, notes = settings.args, num_gpus > 0, list[str]()
    resolver = Resolver(settings)
    trainer = None if args.debug_rollout_only else resolver.setting("trainers", "train_backend")
    function = resolver.setting("rollouts", "rollout_function_path")
    generates = traits_of(function, RolloutTraits).needs_engine and not args.debug_train_only
    engine = resolver.setting("engines", "rollout_engine") if generates else None
    ask = getattr(trainer, "processes", None)
    processes = (ask(settings) if ask is not None else None) or 1
    settle_trainer(settings, processes)
    engines, warnings = engines_of(engine, settings, num_gpus)
    notes += warnings
    placement = plan_placement(
        args,
        trainer_processes=processes,
        engines=engines,
        gpus=gpus,
        num_gpus=num_gpus or None,
        num_cpus=num_cpus,
    )
    sharding = sharding_of(trainer, args, processes, gpus)
    rows = _rows(args, notes)
    batches = None if args.debug_rollout_only else plan_batches(
        args, data_parallel=sharding.data, context=sharding.context, rows=rows
    )  # fmt: skip
    estimator = resolver.setting("estimators", "advantage_estimator") if trainer is not None else None
    memory = _memory(args, trainer, engine, estimator, placement, sharding, notes)
    return RunPlan(batches, schedule_in_words(args), placement, memory, notes)


def sharding_of(trainer: Any, args: Args, processes: int, gpus: bool) -> Sharding:
    """How the trainer's class lays a model out: whole in each process, unless it reads Megatron's flags."""
    half = args.dtype == "bfloat16" or (args.dtype == "auto" and gpus)
    if not traits_of(trainer, TrainerTraits).reads_megatron:
        return Sharding(data=processes, compute_bytes=2 if half else 4)
    layout = Layout.from_args(args)
    return Sharding(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor or layout.tensor,
        data=layout.data_size(processes),
        sequence_parallel=layout.sequence_parallel,
        weight_bytes=2 if half else 4,
        master_bytes=4 if half else 0,
        compute_bytes=2 if half else 4,
        spread_optimizer=getattr(args, "use_distributed_optimizer", True) is not False,
    )


def _rows(args: Args, notes: list[str]) -> int | None:
    if not args.prompt_data or args.debug_train_only:
        return None
    try:
        rows = open_rows(args.prompt_data, "--prompt-data")
        try:
            return len(rows)
        finally:
            rows.close()
    except SlimeError as error:
        notes.append(f"no epochs: {error}")
        return None


def _memory(
    args: Args, trainer: Any, engine: Any, estimator: Any, placement: Placement, sharding: Sharding, notes: list[str]
) -> list[DeviceMemory]:
    directory = Path(args.hf_checkpoint or "")
    try:
        # Without a trainer (--debug-rollout-only) Megatron's families are asked: engines serve more than "models" has.
        shape, parameters = decoder_shape(directory, trainer or megatron_families), Parameters.of_directory(directory)
    except (SlimeError, OSError, ValueError) as error:
        why = "; --prepare-path makes the model" if args.prepare_path and not directory.is_dir() else f": {error}"
        notes.append(f"no memory estimate{why}")
        return []
    if not parameters.total:
        notes.append(f"no memory estimate: {directory} has no *.safetensors")
        return []
    longest = longest_sample(args)
    found: list[DeviceMemory] = []
    training: list[Item] = []
    if placement.trainers and trainer is not None:
        frozen = sum(
            map(
                bool,
                (args.kl_coef or args.use_kl_loss, args.use_opd and args.opd_teacher_load, args.keep_old_actor),
            )
        )
        training = trainer_items(
            args, parameters, shape, sharding, longest=longest, frozen=frozen,
            critic=bool(getattr(estimator, "needs_values", False)),
            chunk_elements=(32 if placement.device == "cuda" else 4) << 20, gpu=placement.device == "cuda",
        )  # fmt: skip
        found.append(DeviceMemory(f"trainer, each of {len(placement.trainers)}", training))
    if placement.engines:
        first = placement.engines[0]
        generating = engine_items(
            parameters, shape, size=len(first.bundles), dtype_bytes=sharding.compute_bytes,
            running=min(args.engine_max_running_requests, args.sglang_server_concurrency,
                        -(-args.rollout_batch_size * args.n_samples_per_prompt // len(placement.engines))),
            longest=longest, limit=args.engine_max_tokens,
        )  # fmt: skip
        found.append(DeviceMemory(f"engine, each device of {len(placement.engines)}", generating))
        if training and (placement.shared or placement.device == "cpu"):
            what = "shared devices" if placement.device == "cuda" else "one process with both (--launcher inline)"
            trains, generates = traits_of(trainer, TrainerTraits), traits_of(engine, EngineTraits)
            phases = phase_items(
                training, generating, overlap=args.async_training,
                offload_train=bool(args.offload_train) and "offload_train" in trains.uses,
                offload_rollout=bool(args.offload_rollout) and "offload_rollout" in generates.uses,
            )  # fmt: skip
            found.append(DeviceMemory(what, phases, phases=True))
    return found


def _of(needed: float, device_bytes: float | None) -> str:
    if device_bytes is None:
        return ""
    share = needed / device_bytes
    verdict = "fits" if share <= 1 / FACTOR else "may not fit" if share <= 1 else "does not fit"
    return f" of {shown(device_bytes)}: {verdict}"
