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

from slime_commands.plan.batch import BatchPlan, longest_sample, plan_batches, schedule_in_words
from slime_commands.plan.memory import (
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
from slime_commands.plan.roofline import Seconds, model_numbers, seconds
from slime_core.config import Settings
from slime_core.data.dataset import open_rows
from slime_core.errors import SlimeError
from slime_core.launch.components import Resolver
from slime_core.models.family import DecoderShape
from slime_core.protocols import Args, EngineTraits, RolloutTraits, TrainerTraits, traits_of


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that a device, or a process on CPU, needs."""

    device: str
    """Description of the devices."""
    items: list[Item]
    phases: bool = False
    """Whether the items are phases, one after the other, and not parts."""
    limit: float | None = None
    """Limit in bytes that the process itself keeps, such as a server's share of a GPU; None without a limit."""

    @property
    def total(self) -> float:
        """Total bytes, or the largest phase."""
        return max(item.bytes for item in self.items) if self.phases else total(self.items)

    @property
    def peak(self) -> str:
        """Phase that needs the most memory; empty if there is only one phase."""
        return max(self.items, key=lambda item: item.bytes).name if self.phases and len(self.items) > 1 else ""


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run."""

    batches: BatchPlan | None
    schedule: list[str]
    placement: Placement
    memory: list[DeviceMemory]
    seconds: Seconds | None = None
    """Estimated time of a rollout on GPUs; None without GPUs or without the model's numbers."""
    overlap: bool = False
    """Whether generation and training run at the same time."""
    notes: list[str] = field(default_factory=list)
    """Values that could not be determined, with the reason."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "batches": self.batches.to_dict() if self.batches else None,
            "schedule": self.schedule,
            "placement": self.placement.to_dict(),
            "memory": [
                {"device": m.device, "bytes": m.total, "peak": m.peak, "items": [asdict(i) for i in m.items]}
                for m in self.memory
            ],
            "seconds": asdict(self.seconds) if self.seconds else None,
            "notes": self.notes,
        }

    def describe(self, device_bytes: float | None = None) -> Iterator[str]:
        """Yield readable lines; `device_bytes` adds a comparison with the memory of a device."""
        yield "batches"
        for line in self.batches.describe() if self.batches else []:
            yield f"  {line}"
        yield from ("", "schedule", *(f"  {line}" for line in self.schedule))
        yield from ("", "placement", *(f"  {line}" for line in self.placement.describe().splitlines()))
        if self.memory:
            yield from ("", f"memory (above what libraries take; measured peaks lie within {FACTOR:g}x)")
        for device in self.memory:
            when = f", while it is to {device.peak}" if device.peak else ""
            yield f"  {device.device}: {shown(device.total)}{when}{_of(device, device_bytes)}"
            width = max(len(item.name) for item in device.items)
            for item in device.items:
                yield f"    {item.name:<{width}}  {shown(item.bytes):>9}  {item.how}"
        if self.seconds:
            yield from ("", "time", f"  {self.seconds.describe(self.overlap)}")
        for note in self.notes:
            yield from ("", f"note: {note}")


def plan_run(
    settings: Settings, *, num_gpus: int, num_cpus: float | None = None, gpu_bytes: float | None = None
) -> RunPlan:
    """Plan a training run.

    Args:
        settings: Settings of `slime train` or `slime sft`.
        num_gpus: GPUs of the cluster; 0 for a cluster without GPUs.
        num_cpus: CPUs of the cluster; None: enough.
        gpu_bytes: Memory of a GPU, if known.

    Raises:
        ConfigError: Such a run is impossible.
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
    if num_gpus > placement.num_gpus > 0:
        notes.append(_idle(args, trainer, placement, num_gpus))
    try:
        # Without a trainer (--debug-rollout-only) Megatron's families are asked: engines serve more than "models" has.
        shape, parameters, source = model_numbers(args, trainer or megatron_families)
    except (SlimeError, OSError, ValueError) as error:
        made = args.prepare_path and not Path(args.hf_checkpoint or "").is_dir()
        notes.append(f"no memory estimate{'; --prepare-path makes the model' if made else f': {error}'}")
        return RunPlan(batches, schedule_in_words(args), placement, [], notes=notes)
    notes += [source] if source else []
    model = _Model(args, trainer, engine, bool(getattr(estimator, "needs_values", False)), shape, parameters)
    memory = _memory(model, placement, sharding, gpu_bytes)
    took = _seconds(model, placement, gpu_bytes) if gpus else None
    return RunPlan(batches, schedule_in_words(args), placement, memory, took, args.async_training, notes)


@dataclass(frozen=True)
class _Model:
    """Inputs of the estimates of memory and time."""

    args: Args
    trainer: Any
    engine: Any
    critic: bool
    shape: DecoderShape
    parameters: Parameters

    @property
    def frozen(self) -> int:
        """Number of models of the actor's size besides the trained one."""
        args = self.args
        return bool(args.kl_coef or args.use_kl_loss) + bool(args.keep_old_actor)

    @property
    def teachers(self) -> list[Parameters]:
        """Parameters of each teacher in the trainer; the actor's for one that the run has yet to make.

        The base of adapters needs no memory of its own.
        """
        from slime_embedded.trainer.teachers import Teachers

        args, found = self.args, list[Parameters]()
        for path in Teachers.of(args).directories.values():
            if args.lora_rank is None or path != args.hf_checkpoint:
                teacher = Parameters.of_directory(Path(path))
                found.append(teacher if teacher.total else self.parameters)
        return found

    def running(self, engines: int) -> int:
        """Return the number of concurrent samples in an engine."""
        args = self.args
        each = -(-args.rollout_batch_size * args.n_samples_per_prompt // engines)
        return int(min(args.engine_max_running_requests, args.sglang_server_concurrency, each))

    def share(self, gpu_bytes: float | None) -> float | None:
        """Return the bytes of a GPU that an engine with a fixed share takes, as servers do; None for other engines."""
        if gpu_bytes is None or not hasattr(self.engine, "launch_plan"):
            return None
        given = hasattr(self.args, "sglang_mem_fraction_static") and self.args.sglang_mem_fraction_static
        return gpu_bytes * (given or _STATIC)


_STATIC = 0.85
"""Approximate share of a GPU that SGLang takes without --sglang-mem-fraction-static."""


def _idle(args: Args, trainer: Any, placement: Placement, num_gpus: int) -> str:
    """Return the flags that would use idle GPUs."""
    half = max(1, num_gpus // 2)
    apart = f"--actor-num-gpus-per-node {half} --rollout-num-gpus {num_gpus - half}"
    if traits_of(trainer, TrainerTraits).reads_megatron:
        more = f"--colocate --actor-num-gpus-per-node {num_gpus}, or {apart}"
    else:
        generating = sum(len(engine.bundles) for engine in placement.engines)
        part = "part" if traits_of(trainer, TrainerTraits).collective_weights else "copy"
        more = (
            f"--actor-num-gpus-per-node {num_gpus - generating} (a {part} of the model on each), or --train-backend"
            f" megatron --rollout-engine sglang {apart} --tensor-model-parallel-size {min(half, 2)} (a part on each)"
        )
    return f"{num_gpus - placement.num_gpus} of {num_gpus} GPUs are idle; type {more}"


def _seconds(model: _Model, placement: Placement, gpu_bytes: float | None) -> Seconds | None:
    args = model.args
    if not placement.trainers or not placement.engines:
        return None
    longest, response = longest_sample(args), args.rollout_max_response_len or 0
    size, count = len(placement.engines[0].bundles), len(placement.engines)
    running = model.running(count)
    if (share := model.share(gpu_bytes)) is not None:
        per_token = 4 * model.shape.num_layers * model.shape.num_kv_heads * model.shape.head_dim
        room = (share * size - 2 * model.parameters.total) / per_token / longest
        running = max(1, min(running, int(room)))
    response = min(response, longest)
    return seconds(
        model.shape,
        model.parameters.total,
        samples=args.rollout_batch_size * args.n_samples_per_prompt,
        prompt=longest - response,
        response=response,
        running=running,
        trainers=len(placement.trainers),
        engines=count,
        engine_size=size,
        extra_passes=model.frozen + bool(model.teachers) + (args.num_steps_per_rollout > 1),
    )


def sharding_of(trainer: Any, args: Args, processes: int, gpus: bool) -> Sharding:
    """Return the trainer's layout of a model: whole in each process, fully sharded, or by Megatron's flags."""
    half, traits = args.dtype == "bfloat16" or (args.dtype == "auto" and gpus), traits_of(trainer, TrainerTraits)
    compute = 2 if half else 4
    if not traits.reads_megatron and traits.collective_weights:
        # A shard and its gradient, and the optimizer's own copies of both.
        return Sharding(
            data=processes, fully=processes, gradient_bytes=8, master_bytes=4, compute_bytes=compute
        )  # fmt: skip
    if not traits.reads_megatron:
        return Sharding(data=processes, compute_bytes=compute)
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


def _memory(model: _Model, placement: Placement, sharding: Sharding, gpu_bytes: float | None) -> list[DeviceMemory]:
    args, trainer, engine, shape, parameters = model.args, model.trainer, model.engine, model.shape, model.parameters
    longest = longest_sample(args)
    found: list[DeviceMemory] = []
    training: list[Item] = []
    if placement.trainers and trainer is not None:
        training = trainer_items(
            args, parameters, shape, sharding, longest=longest, frozen=model.frozen, critic=model.critic,
            teachers=model.teachers,
            chunk_elements=(32 if placement.device == "cuda" else 4) << 20, gpu=placement.device == "cuda",
        )  # fmt: skip
        found.append(DeviceMemory(f"trainer, each of {len(placement.trainers)}", training))
    if placement.engines:
        first, share = placement.engines[0], model.share(gpu_bytes)
        generating = engine_items(
            parameters, shape, size=len(first.bundles), dtype_bytes=sharding.compute_bytes,
            running=model.running(len(placement.engines)), longest=longest, limit=args.engine_max_tokens,
            share=share, models=1 + len(args.lora_adapters),
        )  # fmt: skip
        found.append(DeviceMemory(f"engine, each device of {len(placement.engines)}", generating, limit=share))
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


def _of(device: DeviceMemory, device_bytes: float | None) -> str:
    if device_bytes is None:
        return ""
    share = device.total / device_bytes
    sure = 1 / FACTOR if device.limit is None else device.limit / device_bytes
    verdict = "fits" if share <= sure else "may not fit" if share <= 1 and device.limit is None else "does not fit"
    return f" of {shown(device_bytes)}: {verdict}"
