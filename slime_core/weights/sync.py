"""Stage 11: trained parameters -> the rollout engines, under a version that only grows.

The loop calls `push` after every update. Transports: `tensor` and `distributed` hand the trainer's tensors to the
engine, which copies them in this process, through shared memory or by broadcast; `disk` writes an HF-layout directory
that the engine loads; `delta` writes what changed (`delta_writer`), which pullers beside the engines apply to their own
copy. `--check-weight-update-equal` compares what is served with what was trained, tensor by tensor.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from safetensors import SafetensorError

from slime_core.errors import ConfigError, WeightSyncError
from slime_core.models.hf_io import copy_assets, write_weights
from slime_core.protocols import Args, Trainer
from slime_core.waits import named
from slime_core.weights.checksum import checksum_dtype, tensor_checksum
from slime_core.weights.collective import SharedWeights
from slime_core.weights.delta_writer import DeltaWriter, stored_dtypes

logger = logging.getLogger(__name__)

Metrics: TypeAlias = Mapping[str, float] | None
"""What an engine measured in an update, if anything."""


class WeightReceiver(Protocol):
    """The generation side (`rollout.stage.RolloutStage`)."""

    @property
    def weight_transports(self) -> tuple[str, ...]:
        """Transports offered, best first."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> Metrics:
        """Take tensors of this process."""

    def update_weights_from_distributed(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> Metrics:
        """Take tensors of this process by broadcast."""

    def update_weights_from_disk(self, path: Path, version: int) -> Metrics:
        """Load an HF-layout directory."""

    def update_weights_from_delta(self, root: Path, version: int) -> Metrics:
        """Bring local copies to the version below `root`, and load them."""

    @property
    def engines(self) -> Sequence[object]:
        """For the user's function."""

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str] | None:
        """Names that are served differently; None when the receiver can only tell checksums."""

    def weight_checksums(self) -> dict[str, str]:
        """Of what is served."""


class WeightSync:
    """Pushes the actor's weights and counts versions."""

    def __init__(
        self,
        args: Args,
        trainer: Trainer,
        receiver: WeightReceiver,
        on_update: Callable[[int], object] = lambda version: None,
        post_write: Callable[..., Any] | None = None,
    ) -> None:
        """`on_update` is told each version once it is served; `post_write` tells the hook `slime_weights_written`.

        Raises:
            ConfigError: The engine does not take what the settings say, or the directory is another run's.
        """
        self.args = args
        self._on_update = on_update
        self.version = args.update_weight_start_version
        self._trainer = trainer
        self._weights = SharedWeights(trainer)
        self._receiver = receiver
        self.transport = self._choose()
        """As far as it is known before the engine has started, and from the first push on for good."""
        self._pushed = False
        self._kept: Path | None = None
        """Directory of the version that is served, for an engine that has to be brought up to date."""
        self._post_write = post_write
        self._sent: Mapping[str, torch.dtype] = {}
        """Tensor -> dtype it is sent in, where that is not the trainer's."""
        if self.transport == "delta":
            assert args.run_dir is not None, "every run has one"
            self._sent = self._dtypes_sent()
            self._writer = DeltaWriter(
                self._disk_root(),
                Path(args.hf_checkpoint),
                run=str(Path(args.run_dir).resolve()),
                encoding=args.update_weight_delta_encoding,
                checksum=args.update_weight_delta_checksum,
                shard_bytes=args.update_weight_buffer_size,
                keep_files=args.update_weight_disk_keep_files,
            )

    @named(
        "weights to the engines",
        deadline="weight_push_timeout",
        then="the process ends (--weight-push-timeout)",
        stop=True,
    )
    def push(self) -> dict[str, float]:
        """Make the engines serve the trainer's weights as the next version.

        Raises:
            WeightSyncError: The engine refused them, or serves something else afterwards.
        """
        with self._weights.update():
            metrics = self._serve_next() if self._receiver.weight_transports else {}
        if getattr(self.args, "keep_old_actor", False):
            self._trainer.update_old_actor()
        return metrics

    def _serve_next(self) -> dict[str, float]:
        started = time.perf_counter()
        version = self.version + 1
        if not self._pushed:
            self._pushed, self.transport = True, self._choose(told=True)
            by_files = self.transport in ("disk", "delta")
            if self._post_write is not None and self.args.custom_update_weight_post_write_path and not by_files:
                logger.warning(
                    "--custom-update-weight-post-write-path: without effect, since weights go by %s and not by files;"
                    " type --update-weight-transport disk or --update-weight-mode delta",
                    self.transport,
                )
        if self.transport == "disk":
            extra = self._push_disk(version)
        elif self.transport == "delta":
            extra = self._push_delta(version)
        else:
            extra = self._push_tensors(version)
        self.version = version
        metrics = {"perf/update_weights_time": time.perf_counter() - started, **extra}
        if self.args.check_weight_update_equal:
            self.verify()
        self._on_update(version)
        return metrics

    def _choose(self, *, told: bool = False) -> str:
        args = self.args
        colocate, offered = getattr(args, "colocate", False), self._receiver.weight_transports
        chosen = choose_transport(args.update_weight_transport, offered, args.update_weight_mode, colocate=colocate)
        if told and args.update_weight_transport == "nccl":
            logger.info("--update-weight-transport nccl: weights go by %s", chosen)
        return chosen

    def _push_tensors(self, version: int) -> dict[str, float]:
        sent = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal sent
            for name, tensor in self._weights.named_weights():
                sent += tensor.numel() * tensor.element_size()
                yield name, tensor

        broadcast = self.transport == "distributed"
        update = self._receiver.update_weights_from_distributed if broadcast else self._receiver.update_weights
        measured = update(counted(), version) or {}
        return {"perf/update_weights_wire_bytes": float(sent), **measured}

    def _push_disk(self, version: int) -> dict[str, float]:
        directory = self._disk_root() / f"weight_v{version:06d}"
        shutil.rmtree(directory, ignore_errors=True)
        try:
            copy_assets(self.args.hf_checkpoint, directory)
            write_weights(directory, self._weights.named_weights(), shard_bytes=int(self.args.save_shard_size * 1e9))
        except (OSError, SafetensorError) as error:  # the latter also when the disk is full
            shutil.rmtree(directory, ignore_errors=True)
            raise WeightSyncError(
                f"weight version {version} could not be written, so {self.version} goes on being served:"
                f" {error}. Free space in {directory.parent}, or choose another --update-weight-disk-dir"
            ) from error
        self._tell_user(directory)
        written = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        measured = self._receiver.update_weights_from_disk(directory, version) or {}
        if not self.args.update_weight_disk_keep_files:
            # An engine that is brought back loads the version served once more, so that one stays until the next is.
            done, self._kept = (
                (self._kept, directory) if getattr(self.args, "use_fault_tolerance", False) else (directory, None)
            )
            if done is not None:
                shutil.rmtree(done)
        return {"perf/update_weights_wire_bytes": float(written), **measured}

    def _push_delta(self, version: int) -> dict[str, float]:
        written = self._writer.write(self._weights.named_weights(), version)
        self._tell_user(written.directory)
        measured = self._receiver.update_weights_from_delta(self._writer.root, version) or {}
        self._writer.prune()
        return {
            **measured,
            "perf/update_weights_density": written.density,
            "perf/update_weights_wire_bytes": float(written.wire_bytes),
        }

    def _tell_user(self, directory: Path) -> None:
        """Files are complete, and no engine reads them yet."""
        if self._post_write is not None:
            engines = list(self._receiver.engines)
            self._post_write(args=self.args, version_dir=str(directory), rollout_engines=engines)

    def _disk_root(self) -> Path:
        directory, run_dir = self.args.update_weight_disk_dir, self.args.run_dir
        return Path(directory) if directory else Path(str(run_dir)) / "weights"

    def _dtypes_sent(self) -> Mapping[str, torch.dtype]:
        """Deltas have the checkpoint's dtypes, as what the engines started with."""
        dtypes = stored_dtypes(Path(self.args.hf_checkpoint))
        narrow = sorted(name for name, dtype in dtypes.items() if dtype != torch.float32)
        if self.args.true_on_policy_mode and narrow:
            raise ConfigError(
                "--true-on-policy-mode with --update-weight-mode delta needs a float32 --hf-checkpoint: deltas have its"
                f" dtypes, and {narrow[0]} is {dtypes[narrow[0]]}"
            )
        return dtypes

    def verify(self) -> None:
        """Raise WeightSyncError naming the tensors that are not served as trained."""
        total = 0

        def trained() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal total
            for name, tensor in self._weights.named_weights():
                total += 1
                yield name, tensor.detach().to(self._sent.get(name, tensor.dtype))

        wrong = self._receiver.differing_weights(trained())
        if wrong is None:
            wrong = self._wrong_checksums(trained())
        if wrong:
            raise WeightSyncError(
                f"weight version {self.version}: {len(wrong)} of {total} tensors served differ from those"
                f" trained ({', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''})"
            )

    def _wrong_checksums(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        served = self._receiver.weight_checksums()
        trained: dict[str, str] = {}
        for name, tensor in weights:
            dtype = checksum_dtype(served[name]) if name in served else tensor.dtype
            trained[name] = tensor_checksum(tensor.to(dtype))
        return sorted(name for name in served.keys() | trained.keys() if served.get(name) != trained.get(name))


def choose_transport(wanted: str, offered: tuple[str, ...], mode: str = "full", *, colocate: bool = False) -> str:
    """The engine's transport for `--update-weight-transport` and `--update-weight-mode`.

    "auto" takes the engine's best. "nccl", THUDM/slime's default, means there that weights do not go through files:
    tensor with `--colocate`, else distributed, and the engine's best where it lacks that. Any other choice that the
    engine lacks is a ConfigError.
    """
    if not offered:
        return "none"
    if mode == "delta":
        if mode not in offered:
            raise ConfigError(
                f"--update-weight-mode delta: this rollout engine takes {', '.join(offered)} only; servers that are"
                " running already take deltas by --update-weight-puller-addrs HOST:PORT ... (slime pull-weights)"
            )
        return mode
    offered = tuple(transport for transport in offered if transport != "delta")
    transport = ("tensor" if colocate else "distributed") if wanted == "nccl" else wanted
    if wanted == "auto" or (wanted == "nccl" and transport not in offered):
        return offered[0]
    if transport not in offered:
        raise ConfigError(
            f"--update-weight-transport {wanted!r}: this rollout engine does not take it; allowed: {', '.join(offered)}"
        )
    return transport
