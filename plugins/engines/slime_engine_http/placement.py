"""Compute from settings the number of GPUs of the servers, the first one, and the GPUs of each server.

GPUs are counted over the whole cluster, node after node: number g is ordinal `g % per_node` of node `g // per_node`.
The trainer has the first GPUs; servers use the GPUs after it, or share them under `--colocate`. Called by `planner`. On
CPU a "GPU" is a share of the cores; it is counted but has no ordinal, and there is one node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

from slime_core.config.settings import Origin, Settings
from slime_core.config.spec import flag_specs
from slime_core.errors import ConfigError
from slime_core.launch.launchers import launcher_traits
from slime_core.protocols import Args
from slime_core.protocols.launcher import gpu_layout
from slime_engine_http.plan import Reservation

Device = Literal["cpu", "cuda"]
CLUSTER_GPUS = "SLIME_CLUSTER_GPUS"
"""Environment variable: number of GPUs over all nodes, set by a launcher that knows the cluster."""


@dataclass
class Cited:
    """A formatter of settings for messages: `--rollout-num-gpus 3 (run.yaml:4)`; without origins only the value."""

    args: Args
    origins: Mapping[str, Origin] | None

    def __call__(self, name: str) -> str:
        """Return the setting with its value."""
        shown = flag_specs()[name].show(getattr(self.args, name))
        return shown if self.origins is None else f"{shown} ({self.origins[name]})"


@dataclass(frozen=True)
class Room:
    """The GPUs of the servers."""

    device: Device
    first: int
    """Number of the first GPU in the cluster."""
    total: int
    per_node: int
    trainer: int
    """The trainer has the GPUs before this number."""

    def is_shared(self, start: int, size: int) -> bool:
        """Return True if the trainer uses some of GPUs `start` to `start + size` (from the first server's on), too."""
        return self.device == "cuda" and size > 0 and self.first + start < self.trainer

    def parts(self, start: int, size: int, name: str, cited: str, *, whole: bool = True) -> list[Reservation]:
        """Return GPUs `start` to `start + size` (from the first server's on), by node.

        Args:
            start: First GPU of the engine.
            size: Number of its GPUs.
            name: Name of the engine.
            cited: The setting that `size` comes from.
            whole: If True, an engine no larger than a node must be on one node, and a larger engine must fill nodes.

        Raises:
            ConfigError: The engine would cross nodes.
        """
        if self.device == "cpu":
            return [Reservation(name, 0, ())]
        begin, end = self.first + start, self.first + start + size
        crosses = begin // self.per_node != (end - 1) // self.per_node
        if whole and crosses and (begin % self.per_node or end % self.per_node):
            raise ConfigError(
                f"{name}: GPUs {begin} to {end - 1} ({cited}) lie across nodes of --num-gpus-per-node {self.per_node};"
                " an engine lies on one node, or fills several: choose a size that divides the node, or a multiple of"
                " it, or move it with a placeholder group in --sglang-config."
            )
        by_node = groupby((divmod(gpu, self.per_node) for gpu in range(begin, end)), key=itemgetter(0))
        return [Reservation(name, node, tuple(ordinal for _, ordinal in gpus)) for node, gpus in by_node]


def find_room(args: Args, device: Device, visible: int, listed: int | None, cite: Cited) -> tuple[Room, list[str]]:
    """Return the GPUs for the servers, and warnings.

    The layout is THUDM/slime's (placement_group.py): after the trainer's GPUs; from 0 with `--colocate` or without a
    trainer.

    Args:
        args: The run's settings.
        device: Device of the servers.
        visible: Number of available GPUs, over all nodes; ignored on CPU.
        listed: Sum of the GPUs in a `--sglang-config` file; None without a file.
        cite: Formatter for messages.

    Raises:
        ConfigError: More GPUs are needed than available, or the number differs from the file's.
    """
    asked, size = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if listed is not None and asked is not None and listed != asked:
        raise ConfigError(
            f"{cite('sglang_config')}: its server groups have {listed} GPUs together (placeholders count), but"
            f" {cite('rollout_num_gpus')}; make them equal, or leave --rollout-num-gpus out."
        )
    total = listed if listed is not None else asked
    if device == "cpu":
        return Room("cpu", 0, size if total is None else total, args.num_gpus_per_node, 0), []
    layout = gpu_layout(args, trainer=args.actor_num_nodes * args.actor_num_gpus_per_node, rollout=total or 0)
    trainer, first = layout.trainer, layout.first_engine
    if total == 0:
        return Room("cuda", 0, 0, args.num_gpus_per_node, trainer), []
    if visible < 1:
        raise ConfigError("no GPU is visible for the servers; type --device cpu, or look at CUDA_VISIBLE_DEVICES.")
    warnings: list[str] = []
    if total is None and args.colocate:
        total = min(trainer, visible) or visible
    elif total is None:
        if first >= visible:
            first = 0
            warnings.append(
                f"{visible} GPUs are visible and the trainer has {_trainers(cite)}: the servers share them with it;"
                " --colocate says so, --rollout-num-gpus N and fewer GPUs for training keep them apart."
            )
        total = visible - first
    if first + total > visible:
        after = f" after the trainer's {_trainers(cite)}" if first else ""
        what = cite("rollout_num_gpus") if asked is not None else f"{cite('sglang_config')} with {total} GPUs"
        fits = [f"at most {visible - first} fit"] if first < visible else ["none is left"]
        if total <= visible:
            fits.append("--colocate shares the trainer's")
        raise ConfigError(
            f"{what}{after} needs {first + total} GPUs, but {visible} are visible: {'; '.join(fits)}; servers on other"
            " machines are named with --rollout-external-engine-addrs."
        )
    return Room("cuda", first, total, args.num_gpus_per_node, trainer), warnings


def near_multiples(total: int, size: int) -> str:
    """Return advice that replaces `total`: the nearest multiples of `size` below and above."""
    below = total // size * size
    return f"{below} or {below + size} works" if below else f"{size} works"


def _trainers(cite: Cited) -> str:
    return f"{cite('actor_num_nodes')} times {cite('actor_num_gpus_per_node')}"


def find_device(setting: str, num_gpus: int | None = None) -> tuple[Device, int]:
    """Return the servers' device for `--device`, and the number of GPUs: `num_gpus` if given, else the visible GPUs."""
    if setting == "cpu":
        return "cpu", 0
    if num_gpus is None:
        num_gpus = cluster_gpus()
    if num_gpus is None:
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ("cuda" if num_gpus or setting == "cuda" else "cpu"), num_gpus


def is_planned_later(settings: Settings) -> bool:
    """Return whether a launcher that spans nodes will count the GPUs of its cluster; then it asks for the plan."""
    args = settings.args
    trains = settings.command == "train" and not args.debug_rollout_only
    return trains and cluster_gpus() is None and args.device != "cpu" and launcher_traits(settings).spans_nodes


def cluster_gpus() -> int | None:
    """Return the number of GPUs over all nodes, if a launcher has set it."""
    return int(os.environ[CLUSTER_GPUS]) if CLUSTER_GPUS in os.environ else None
