"""What generates tokens: `RolloutEngine`, in process or behind HTTP, and what a generate function gets of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime_core.types import GenerationOutput

if TYPE_CHECKING:
    import torch


class RolloutEngine(Protocol):
    """A token generator: in process or behind HTTP; the rollout code cannot tell which.

    Constructed as `cls(args)`; all methods run in one event loop, that of the rollout stage. What it can do beyond
    these is declared by its class as `traits = EngineTraits(...)` (`slime_core.protocols.traits`), and a method
    `stream` (arguments of `generate`) yields everything so far.

    More optional attributes of an engine's or trainer's class concern its settings: the classmethod
    `missing(args) -> str`, what it needs and is
    not installed, with what to type, and the classmethod `check_settings(settings) -> list[str]`, called by every
    command that runs something, and by `slime check`, before anything starts: it returns warnings and raises
    ConfigError. An engine that starts servers may have the classmethod `launch_plan(settings, num_gpus=None)`,
    for `slime engines plan`: what it would start on this machine, or with so many GPUs, as an object with `describe()`
    and `to_dict()`; one that serves several models (`--sglang-config`) the classmethod `planned_models(args) ->
    list[str]`, their names, asked before anything starts. An engine without a plan takes one place of a cluster, or
    none where its traits say `runs_elsewhere`.

    An engine that shares devices with the trainer has two more methods, and "offload_rollout" in what it `uses`; the
    launcher calls them under `--offload-rollout`, while no request is in the engine:

    - `async release_memory(tags=None)`: give up what the tags name, of "weights" and "kv_cache" (None: both). Requests
      wait from here on. Raises EngineError when requests are in it.
    - `async resume_memory(tags=None)`: take it again, first ("weights",), whose values are undefined until the next
      update, which follows; then ("kv_cache",), after which requests are answered.
    """

    weight_transports: ClassVar[tuple[str, ...]]
    """Names of the transports (`WeightTransport`) that this engine takes, best first, such as "tensor", "distributed"
    and "disk"; it has the method `update_weights_from_<name>` of each. One that learns it from its servers may set it
    again in `start`."""

    async def start(self) -> None:
        """Load the model of `args.hf_checkpoint`, or connect; returns when requests are served."""

    async def stop(self) -> None:
        """Abort what runs and free everything; safe to call twice."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> GenerationOutput:
        """Continue `input_ids`; `sampling_params` has SGLang's keys. Raises EngineError.

        An engine that `takes_images` has the keyword `image_data` more: `data:` URLs, in the order of the prompt,
        whose image tokens are in `input_ids` already. It is given only where there are any.
        """

    async def abort(self, rid: str | None = None) -> None:
        """End one request, or all, with finish reason "abort" and the tokens it has."""

    async def pause(self, mode: str = "in_place") -> None:
        """Stop stepping: "in_place" keeps running requests, "abort" ends them."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""

    async def update_weights_from_tensor(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Mapping[str, float] | None:
        """Copy named HF-layout tensors in; running requests go on with the new weights.

        This and the next two consume their argument, raise WeightSyncError, and may return metrics of the update.
        """

    async def update_weights_from_distributed(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Mapping[str, float] | None:
        """The same by broadcast, to servers of other hosts too."""

    async def update_weights_from_disk(self, path: Path, version: int) -> Mapping[str, float] | None:
        """Load an HF-layout directory."""

    async def weight_checksums(self) -> dict[str, str]:
        """HF name -> `weights.checksum.tensor_checksum` of the tensor served.

        For `--check-weight-update-equal`. An engine that cannot tell may have `async def differing_weights(weights) ->
        list[str]` instead: the names whose tensors it serves differently.
        """

    async def address(self) -> tuple[str, int]:
        """Host and port that answer SGLang's HTTP API; an in-process engine serves from this call until `stop`."""

    async def info(self) -> dict[str, Any]:
        """`model_path`, `weight_version`, `max_context_length`, `num_running`, `num_waiting`, ..."""


@dataclass
class GenerateContext:
    """What a generate function gets when it declares the keyword `context`."""

    engine: RolloutEngine
    tokenizer: Any
    """HF tokenizer of `args.hf_checkpoint`."""
    evaluation: bool = False
    rollout_id: int | None = None
