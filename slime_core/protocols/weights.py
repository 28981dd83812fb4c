"""Protocols for sending trained weights to the engines: `WeightTransport`, and the engines as a transport sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime_core.protocols.traits import TransportTraits

if TYPE_CHECKING:
    import torch


class WeightEngines(Protocol):
    """The engines of a run while they take a version."""

    def written(self, directory: Path) -> None:
        """Report that the version's files are complete, before any engine reads them; calls the user's function."""

    def take(self, payload: Any, dtypes: Mapping[str, torch.dtype] | None = None) -> Mapping[str, float]:
        """Load the version into every engine from `payload`; return the metrics that the engines measured.

        Args:
            payload: An iterator of (HF name, tensor), or a value that can be pickled, such as a directory.
            dtypes: HF name -> dtype of the sent tensor, if it is not the trainer's; checks compare in this dtype.

        Raises:
            WeightSyncError: An engine refused the version.
        """


class WeightTransport(Protocol):
    """A transport of weights from the trainer to the engines.

    Constructed as `cls(args)` in the process of the trainer's rank 0, after the trainer and before the first version.
    An engine takes `payload` by its method `update_weights_from_<name of the transport>(payload, version)`. For an
    engine without this method, the transport's static method `async deliver(args, engine, payload, version)` runs in
    the engine's process; a transport with the trait `arrives_by` has it.

    The optional `missing` and `check_settings` work as on an engine's class (`RolloutEngine`).
    """

    traits: ClassVar[TransportTraits]

    def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, engines: WeightEngines
    ) -> Mapping[str, float]:
        """Send a version to the engines by calling `engines.take` exactly once; return metrics of the update.

        A resumed run begins with a version number that engines or files may already have, with other weights.

        Args:
            weights: HF names and tensors, to be read once, in order.
            version: Number of the version, one more than the last version that was taken.
            engines: The engines that take the version.

        Raises:
            WeightSyncError: The version could not be sent or taken; the engines still serve the previous version.
        """
