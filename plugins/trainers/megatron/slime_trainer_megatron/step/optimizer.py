"""Megatron's data-parallel wrapper and optimizer around the trained model, stepped by slime's rules.

Called by `trainer.py`, inside `on_device`. Gradients arrive summed over all ranks (`forward.finalize`). Here their norm
is computed over all ranks, and they are clipped and applied, with the embedded trainer's learning-rate schedule and its
rule for gradients that are not finite. Megatron's own `optimizer.step()` is not called: it checks for finite gradients
only with loss scaling, and would apply NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from slime_embedded.trainer.optimizer import MAX_CONSECUTIVE_SKIPS
from slime_embedded.trainer.schedule import LearningRateSchedule

from slime_core.errors import ConfigError, TrainError
from slime_trainer_megatron.step.forward import finalize


def wrap_for_training(chunks: Sequence[Any], config: Any, ddp_config: Any) -> list[Any]:
    """Wrap model chunks so that their gradients are summed over data- and context-parallel ranks.

    Args:
        chunks: `GPTModel`s; frozen parameters already have `requires_grad` False.
        config: Their `TransformerConfig`; gets the callbacks of the schedule.
        ddp_config: Megatron's `DistributedDataParallelConfig`.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    assert config.calculate_per_token_loss, "gradients are summed, not averaged"
    wrapped = []
    for number, chunk in enumerate(chunks):
        inner = Float16Module(config, chunk) if config.bf16 else chunk
        wrapped.append(DistributedDataParallel(config, ddp_config, inner, disable_bucketing=number > 0))
    config.finalize_model_grads_func = finalize
    if ddp_config.overlap_grad_reduce:
        no_syncs = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_syncs[0] if len(no_syncs) == 1 else no_syncs
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        param_syncs = [chunk.start_param_sync for chunk in wrapped]
        config.param_sync_func = param_syncs[0] if len(param_syncs) == 1 else param_syncs
    return wrapped


class ParamScheduler:
    """The `opt_param_scheduler` argument of `--custom-megatron-before-train-step-hook-path`.

    Sets learning rate and weight decay of every parameter group before each step. It has the method names of Megatron's
    `OptimizerParamScheduler` and the values of `LearningRateSchedule`.
    """

    def __init__(self, optimizer: Any, schedule: LearningRateSchedule, weight_decay: float) -> None:
        self.optimizer, self.schedule, self.weight_decay = optimizer, schedule, weight_decay
        self.num_steps = 0
        """Number of optimizer steps taken."""

    def get_lr(self, param_group: dict[str, Any] | None = None) -> float:
        """Return the learning rate of the next step; a group may have its own highest and lowest rates."""
        schedule = self.schedule
        if param_group is not None and not param_group.get("default_config", True):
            highest, lowest = param_group.get("max_lr"), param_group.get("min_lr")
            schedule = replace(
                schedule,
                lr=schedule.lr if highest is None else highest,
                min_lr=schedule.min_lr if lowest is None else lowest,
            )
        return schedule.at(self.num_steps) * (1.0 if param_group is None else param_group.get("lr_mult", 1.0))

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Return the weight decay of the next step."""
        return self.weight_decay * (1.0 if param_group is None else param_group.get("wd_mult", 1.0))

    def apply(self) -> None:
        """Set learning rate and weight decay of the next step in every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = self.get_lr(group), self.get_wd(group)

    def step(self, increment: int = 1) -> None:
        """Count steps that were taken, and set the values of the next step."""
        self.num_steps += increment
        self.apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings that affect later rates."""
        return {"num_steps": self.num_steps, "schedule": self.schedule.facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the position of `state_dict`; the caller checks that the settings agree."""
        self.num_steps = int(state["num_steps"])
        self.apply()


class MegatronAdam:
    """Megatron's optimizer of the wrapped chunks.

    Args:
        chunks: From `wrap_for_training`.
        config: Megatron's `OptimizerConfig`.
        schedule: Learning rate by step.
        stateless: `--use-stateless-adam`: every step is a first step, and no moments are kept.
    """

    def __init__(
        self, chunks: Sequence[Any], config: Any, schedule: LearningRateSchedule, *, stateless: bool = False
    ) -> None:
        from megatron.core.optimizer import get_megatron_optimizer

        if config.optimizer_cpu_offload and not torch.cuda.is_available():
            raise ConfigError("--optimizer-cpu-offload: there is no GPU to offload from; leave it out")
        self.chunks, self.config, self.stateless = list(chunks), config, stateless
        self.optimizer: Any = get_megatron_optimizer(config, self.chunks)
        self.scheduler = ParamScheduler(self.optimizer, schedule, config.weight_decay)
        self.scheduler.apply()
        self._skips_in_a_row = 0
        self._on_gpu = any(p.is_cuda for chunk in self.chunks for p in chunk.parameters())
        self._moments_moved = False

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken; drives the schedule."""
        return self.scheduler.num_steps

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip the summed gradients and update; the same result on every rank.

        A step whose gradients are not finite is skipped: weights, moments and schedule stay as they are.

        Returns:
            `grad_norm` over all parameters of the model, before clipping; `lr`; `skipped_steps` 0 or 1.

        Raises:
            TrainError: `MAX_CONSECUTIVE_SKIPS` steps in a row were skipped.
        """
        self.scheduler.apply()
        lr = self.scheduler.get_lr()
        not_finite = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not_finite or not math.isfinite(norm):
            self._skipped(norm)
            return {"grad_norm": norm, "lr": lr, "skipped_steps": 1.0}
        self._skips_in_a_row = 0
        self._clip(norm)
        self.optimizer.step_with_ready_grads()
        if self.stateless:
            self.reset_moments()
        self.scheduler.step()
        return {"grad_norm": norm, "lr": lr, "skipped_steps": 0.0}

    def _skipped(self, norm: float) -> None:
        self._skips_in_a_row += 1
        if self._skips_in_a_row >= MAX_CONSECUTIVE_SKIPS:
            raise TrainError(
                f"gradient norm was {norm} in {self._skips_in_a_row} optimizer steps in a row; the weights are"
                " those before the first of them. Look at train/loss and the rewards, or lower --lr"
            )

    def _clip(self, norm: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        if not self.config.clip_grad > 0:
            return
        for part in self.parts():
            if parameters := part.get_parameters():
                decoupled = self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, norm, decoupled)

    def offload(self) -> None:
        """Free the gradient buffers, and move moments from a GPU to the host; on a CPU they do not move.

        Megatron's own `offload_to_cpu` of optimizers is not called: it allocates new memory for the optimizer's
        parameters, so some would no longer be views of the model's parameters.
        """
        for chunk in self._chunks_with_own_gradients():
            chunk.offload_grad_buffers(synchronize=self._on_gpu, empty_cache=self._on_gpu)
        self._move_moments("cpu")

    def onload(self) -> None:
        """Allocate the memory again, with zero gradients and the previous moments."""
        for chunk in self._chunks_with_own_gradients():
            chunk.restore_grad_buffers(synchronize=self._on_gpu)
        self._move_moments("cuda")

    @contextmanager
    def moments_on_device(self) -> Iterator[None]:
        """Move the moments to the training device inside the context, and back to their place at its end."""
        moved = self._moments_moved
        self._move_moments("cuda")
        try:
            yield
        finally:
            if moved:
                self._move_moments("cpu")

    def _chunks_with_own_gradients(self) -> Iterator[Any]:
        """Yield the chunks whose gradient buffers do not also hold parameters, as they do with MXFP8's all-gather."""
        return (c for c in self.chunks if not getattr(c.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False))

    def _move_moments(self, device: str) -> None:
        if not self._on_gpu or self._moments_moved == (device == "cpu"):
            return
        for optimizer in self._torch_optimizers():
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() and value.device.type != device:
                        state[name] = value.to(device)
        self._moments_moved = device == "cpu"

    def weight_probes(self) -> torch.Tensor:
        """Return some evenly spaced float32 weights of every tensor that this rank updates."""
        groups = [group for optimizer in self._torch_optimizers() for group in optimizer.param_groups]
        probes = [p.detach().reshape(-1)[:: p.numel() >> 8 | 1] for group in groups for p in group["params"]]
        return torch.cat(probes) if probes else torch.zeros(1, device="cuda" if self._on_gpu else "cpu")

    def reset_moments(self) -> None:
        """Reset both moments and their bias-correction count, but not the schedule."""
        for optimizer in self._torch_optimizers():
            # Adam of torch, Apex and Transformer Engine initialise the state of a parameter without state.
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group.pop("step", None)

    def make_moments(self) -> None:
        """Create zero moments for every parameter, so that a checkpoint can be loaded into them."""
        for optimizer in self._torch_optimizers():
            by_parameter = isinstance(optimizer, torch.optim.Adam)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    if by_parameter:
                        state.setdefault("step", torch.tensor(0.0))
                    for name in ("exp_avg", "exp_avg_sq"):
                        if name not in state:
                            state[name] = torch.zeros_like(parameter)

    @property
    def moment_steps(self) -> int:
        """Number of steps in the moments of this rank, for bias correction; 0 for a rank that trains nothing."""
        counts = [0]
        for optimizer in self._torch_optimizers():
            counts += [int(state["step"]) for state in optimizer.state.values() if "step" in state]
            counts += [int(group["step"]) for group in optimizer.param_groups if "step" in group]
        return max(counts)

    def set_moment_steps(self, steps: int) -> None:
        """Set `moment_steps`.

        torch's AdamW counts steps per parameter, each in a tensor of its own; Apex and Transformer Engine per group.
        """
        for optimizer in self._torch_optimizers():
            by_parameter = isinstance(optimizer, torch.optim.Adam)
            for state in optimizer.state.values():
                if by_parameter:
                    state["step"] = torch.tensor(float(steps))
                else:
                    state.pop("step", None)
            for group in optimizer.param_groups:
                group.pop("step", None)
                if not by_parameter:
                    group["step"] = steps

    def sync_parameters(self) -> None:
        """Wait for the weights of a step, which arrive during the next forward pass with `--overlap-param-gather`."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.disable_forward_pre_hook(param_sync=True)
                chunk.enable_forward_pre_hook()

    def take_weights(self) -> None:
        """Copy the model's weights to the optimizer's own copies after a change from outside."""
        self.optimizer.reload_model_params()

    def parts(self) -> list[Any]:
        """Return Megatron's optimizers of dense and of expert parameters; empty if the rank trains no parameters."""
        every = self.optimizer.chained_optimizers
        return [part for part in every if not getattr(part, "is_stub_optimizer", False)]

    def _torch_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        for part in self.parts():
            yield from getattr(part.optimizer, "sub_optimizers", [part.optimizer])
