"""Trained parameters -> the rollout engines, under a version that grows with every push.

The loop calls `push` every `--update-weights-interval` rollouts. The transport sends the version (`TensorTransport`, or
another of the kind `weight_transports`); this module chooses the transport, numbers the versions, and times and checks
the push. `--check-weight-update-equal` compares the served weights with the trained weights, tensor by tensor.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from slime_core.errors import ConfigError, PluginSignatureError, WeightSyncError
from slime_core.plugins.resolve import resolve
from slime_core.protocols import Args, Trainer, TransportTraits, traits_of
from slime_core.waits import named
from slime_core.weights.collective import SharedWeights

if TYPE_CHECKING:
    from slime_core.protocols.weights import WeightEngines, WeightTransport

logger = logging.getLogger(__name__)

NONE = "none"
"""Value in place of a transport's name if no engine receives weights."""
_AUTO, _NCCL = "auto", "nccl"
NO_NAMES = (_AUTO, _NCCL)
"""Values of `--update-weight-transport` that leave the choice to the engine."""

Metrics: TypeAlias = Mapping[str, float] | None
"""Metrics that an engine measured in an update, if any."""


class WeightReceiver(Protocol):
    """The generation side (`rollout.stage.RolloutStage`)."""

    @property
    def weight_transports(self) -> tuple[str, ...]:
        """Transports offered, best first."""

    def update_weights(self, transport: str, payload: object, version: int) -> Metrics:
        """Make the engines serve a version from the payload of the transport (`WeightEngines.take`)."""

    @property
    def engines(self) -> Sequence[object]:
        """Engines, for the user's function."""

    def differing_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str] | None:
        """Return the names of tensors that are served differently; None if the receiver only has checksums."""

    def weight_checksums(self) -> dict[str, str]:
        """Return name -> checksum of the served tensors."""


class WeightSync:
    """The sender of the actor's weights, which also counts versions."""

    def __init__(
        self,
        args: Args,
        trainer: Trainer,
        receiver: WeightReceiver,
        on_update: Callable[[int], object] = lambda version: None,
        post_write: Callable[..., object] | None = None,
    ) -> None:
        """Choose the transport.

        `on_update` is called with each version once the version is served; `post_write` calls the hook
        `slime_weights_written`.

        Raises:
            ConfigError: The engine does not support the settings' transport, or the directory belongs to another run.
        """
        self.args = args
        self._on_update = on_update
        self.version = args.update_weight_start_version
        self._trainer = trainer
        self._weights = SharedWeights(trainer)
        self._receiver = receiver
        self._post_write = post_write
        self.transport = NONE
        """Spec of the transport in use: preliminary before the engine has started, final after the first push."""
        self._way: WeightTransport | None = None
        self._pushed = False
        self._sent: Mapping[str, torch.dtype] = {}
        """Tensor -> dtype in which it was sent, if it differs from the trainer's."""
        self._choose()

    @named(
        "weights to the engines",
        deadline="weight_push_timeout",
        then="the process ends (--weight-push-timeout)",
        stop=True,
    )
    def push(self) -> dict[str, float]:
        """Make the engines serve the trainer's weights as the next version.

        Raises:
            WeightSyncError: The engine refused the weights, or serves other weights afterwards.
        """
        with self._weights.update():
            metrics = self._serve_next() if self._receiver.weight_transports else {}
        if self.args.keep_old_actor:
            self._trainer.update_old_actor()
        return metrics

    def _serve_next(self) -> dict[str, float]:
        started = time.perf_counter()
        version = self.version + 1
        if not self._pushed:
            self._pushed = True
            self._choose(final=True)
        assert self._way is not None, "the receiver offers transports"
        extra = self._way.send(self._weights.named_weights(), version, _Push(self, version))
        self.version = version
        metrics = {"perf/update_weights_time": time.perf_counter() - started, **extra}
        if self.args.check_weight_update_equal:
            self.verify()
        self._on_update(version)
        return metrics

    def _choose(self, *, final: bool = False) -> None:
        """Choose the transport; with `final` also log the choice. An engine may name its transports when it starts."""
        wanted, offered = self.args.update_weight_transport, self._receiver.weight_transports
        chosen = choose_transport(wanted, offered, colocate=self.args.colocate)
        if chosen != self.transport:
            self.transport, self._way = chosen, _load(chosen, offered)(self.args)
        if not final or self._way is None:
            return
        if wanted == _NCCL:
            logger.info("--update-weight-transport nccl: weights go by %s", chosen)
        if self.args.custom_update_weight_post_write_path and not self._way.traits.writes_files:
            logger.warning(
                "--custom-update-weight-post-write-path: without effect, since weights go by %s and not by files;"
                " type --update-weight-transport disk or --update-weight-mode delta",
                chosen,
            )

    def verify(self) -> None:
        """Raise WeightSyncError with the tensors whose served values differ from the trained values."""
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


@dataclass(frozen=True)
class _Push:
    """The `WeightEngines` of one version."""

    sync: WeightSync
    version: int

    def written(self, directory: Path) -> None:
        sync = self.sync
        if sync._post_write is not None:
            engines = list(sync._receiver.engines)
            sync._post_write(args=sync.args, version_dir=str(directory), rollout_engines=engines)

    def take(self, payload: object, dtypes: Mapping[str, torch.dtype] | None = None) -> Mapping[str, float]:
        sync = self.sync
        sync._sent = {} if dtypes is None else dtypes
        return sync._receiver.update_weights(sync.transport, payload, self.version) or {}


def choose_transport(wanted: str, offered: tuple[str, ...], *, colocate: bool = False) -> str:
    """Return the transport's spec for `--update-weight-transport`; "none" if no engine receives weights.

    "auto" takes the engine's best. "nccl" is THUDM/slime's default, where it means that weights do not go through
    files: tensor with `--colocate`, otherwise distributed, or the engine's best if it does not offer that transport.
    """
    if not offered:
        return NONE
    if wanted == _NCCL:
        in_memory = "tensor" if colocate else "distributed"
        return in_memory if in_memory in offered else offered[0]
    return offered[0] if wanted == _AUTO else wanted


def _load(spec: str, offered: tuple[str, ...]) -> Callable[[Args], WeightTransport]:
    """Return the transport's class. Raises PluginError, and ConfigError if the engine does not take the transport."""
    cited = f"--update-weight-transport {spec!r}"
    found: Any = resolve("weight_transports", spec, origin="--update-weight-transport").obj
    if spec.rpartition(":")[2] not in offered and transport_traits(found, cited).arrives_by not in offered:
        raise ConfigError(f"{cited}: this rollout engine does not take it; allowed: {', '.join(offered)}")
    transport: Callable[[Args], WeightTransport] = found
    return transport


def transport_traits(transport: type, cited: str) -> TransportTraits:
    """Return the traits that the transport's class declares. Raises PluginError with a message that begins `cited`."""
    traits = traits_of(transport, TransportTraits, cited)
    if traits.arrives_by is not None and not hasattr(transport, "deliver"):
        raise PluginSignatureError(
            f"{cited}: class {transport.__name__} arrives by {traits.arrives_by!r} and has no async"
            " deliver(args, engine, payload, version)"
        )
    return traits


class TensorTransport:
    """`tensor` and `distributed`: the trainer's own tensors, which the engine copies, maps or broadcasts."""

    traits = TransportTraits()

    def __init__(self, args: Args) -> None:
        del args

    def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, engines: WeightEngines
    ) -> Mapping[str, float]:
        """Pass the weights to the engines one by one, as they arrive."""
        sent = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal sent
            for name, tensor in weights:
                sent += tensor.numel() * tensor.element_size()
                yield name, tensor

        measured = engines.take(counted())
        return {"perf/update_weights_wire_bytes": float(sent), **measured}


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return `<dtype>:<32 hex digits>`, BLAKE2b (128 bits) over shape and raw bytes in row-major order."""
    tensor = tensor.detach().to("cpu").contiguous()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)}".encode(), digest_size=16)
    # One element counts as contiguous with any stride, and only stride 1 can be viewed as bytes.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    digest.update(flat.view(torch.uint8).numpy().data)
    return f"{str(tensor.dtype).removeprefix('torch.')}:{digest.hexdigest()}"


def checksum_dtype(checksum: str) -> torch.dtype:
    """Return the dtype of the tensor that a checksum was made of."""
    dtype = getattr(torch, checksum.split(":", 1)[0])
    assert isinstance(dtype, torch.dtype)
    return dtype
