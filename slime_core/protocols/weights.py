"""How trained weights reach the engines: `WeightTransport`, and the engines as it sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime_core.protocols.traits import TransportTraits

if TYPE_CHECKING:
    import torch


class WeightEngines(Protocol):
    """The engines of a run, while they take one version."""

    def written(self, directory: Path) -> None:
        """Say that the version's files are complete, before any engine reads them: the user's function is told."""

    def take(self, payload: Any, dtypes: Mapping[str, torch.dtype] | None = None) -> Mapping[str, float]:
        """Have the engines serve the version, from what each of them gets as `payload`; what they measured.

        Args:
            payload: An iterator of (HF name, tensor), or a value that can be pickled, such as a directory.
            dtypes: HF name -> dtype in which it was sent, where that is not the trainer's; checks compare in it.

        Raises:
            WeightSyncError: An engine refused it.
        """


class WeightTransport(Protocol):
    """A way for weights from the trainer to the engines.

    Constructed as `cls(args)` where the trainer's rank 0 is, after the trainer and before the first version. An engine
    takes `payload` by its method `update_weights_from_<name of the transport>(payload, version)`. One that has no such
    method is given it, in its own process, by the transport's static method `async deliver(args, engine, payload,
    version)`, which a transport with the trait `arrives_by` has.

    `missing` and `check_settings` are those of an engine's class (`RolloutEngine`).
    """

    traits: ClassVar[TransportTraits]

    def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, engines: WeightEngines
    ) -> Mapping[str, float]:
        """Bring one version to the engines: `engines.take` exactly once; metrics of the update.

        A resumed run begins with a version number that engines, or files, may have had before, with other weights.

        Args:
            weights: HF names and tensors, to be read once, in order.
            version: Larger by one than the last that was taken.
            engines: Who takes it.

        Raises:
            WeightSyncError: It could not be sent, or not be taken; the version before it is what is served.
        """
