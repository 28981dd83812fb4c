"""The protocol of token generators, `RolloutEngine`, and `GenerateContext`, which generate functions receive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slime_core.sample import GenerationOutput

if TYPE_CHECKING:
    import torch


class RolloutEngine(Protocol):
    """A token generator, in process or behind HTTP; the rollout code treats both alike.

    Constructed as `cls(args)`. All methods run in the event loop of the rollout stage. The class declares its optional
    abilities as `traits = EngineTraits(...)` (`slime_core.protocols.traits`). An optional method `stream` takes the
    arguments of `generate` and yields the output so far.

    The class of an engine or a trainer may have these classmethods for its settings:

    - `missing(args) -> str`: the packages that it needs and that are not installed, with the command to install them.
    - `check_settings(settings) -> list[str]`: return warnings, or raise ConfigError. Every command that runs something
      and `slime check` call it before anything starts.
    - `launch_plan(settings, num_gpus=None)`, for an engine that starts servers: the servers to start on this machine or
      with `num_gpus` GPUs, as an object with `describe()` and `to_dict()`. Used by `slime engines plan`.
    - `planned_models(args) -> list[str]`, for an engine that serves several models (`--sglang-config`): their names.
      Called before anything starts.

    An engine without a plan takes one place of a cluster, or none if its traits say `runs_elsewhere`.

    An engine that shares devices with the trainer has two more methods, and "offload_rollout" in its `uses`. The
    launcher calls them under `--offload-rollout`, while the engine has no requests:

    - `async release_memory(tags=None)`: free the memory named by the tags, "weights" and "kv_cache" (None: both).
      Requests wait from then on. Raises EngineError if the engine has requests.
    - `async resume_memory(tags=None)`: allocate the memory again. The first call is ("weights",), whose values are
      undefined until the weight update that follows. The second is ("kv_cache",), after which requests are answered.
    """

    weight_transports: ClassVar[tuple[str, ...]]
    """Names of the transports (`WeightTransport`) that this engine supports, best first, such as "tensor",
    "distributed" and "disk". The engine has a method `update_weights_from_<name>` for each. An engine that learns the
    names from its servers may set them again in `start`."""

    async def start(self) -> None:
        """Load the model of `args.hf_checkpoint`, or connect; return when requests are served."""

    async def stop(self) -> None:
        """Abort all requests and free everything; safe to call twice."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> GenerationOutput:
        """Continue `input_ids`; `sampling_params` has SGLang's keys. Raises EngineError.

        An engine that `takes_images` has another keyword, `image_data`: `data:` URLs in the order of the prompt, whose
        image tokens are in `input_ids` already. It is passed only if the prompt has images. One that `takes_adapters`
        has the keyword `adapter`, a name of `--lora-adapters`, passed only if the generate function gives one. Updates
        have the weights of an adapter NAME as `adapters.NAME.<HF name>`, merged; others are those of every adapter.
        """

    async def abort(self, rid: str | None = None) -> None:
        """End a request, or all, with finish reason "abort" and the tokens generated so far."""

    async def pause(self, mode: str = "in_place") -> None:
        """Stop generation: "in_place" keeps running requests, "abort" ends them."""

    async def resume(self) -> None:
        """Continue generation after `pause`."""

    async def flush_cache(self) -> None:
        """Drop cached prefixes."""

    async def update_weights_from_tensor(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Mapping[str, float] | None:
        """Copy named HF-layout tensors into the model; running requests continue with the new weights.

        All `update_weights_from_...` methods consume their argument, raise WeightSyncError, and may return metrics.
        """

    async def update_weights_from_distributed(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> Mapping[str, float] | None:
        """Receive the weights by broadcast, which also reaches servers on other hosts."""

    async def update_weights_from_disk(self, path: Path, version: int) -> Mapping[str, float] | None:
        """Load an HF-layout directory."""

    async def weight_checksums(self) -> dict[str, str]:
        """Return a mapping from HF names to `weights.sync.tensor_checksum` of the tensors served.

        Used by `--check-weight-update-equal`. An engine without checksums may have `async def
        differing_weights(weights) -> list[str]` instead, which returns the names of tensors that it serves differently.
        """

    async def address(self) -> tuple[str, int]:
        """Return host and port of SGLang's HTTP API; an in-process engine serves it from this call until `stop`."""

    async def info(self) -> dict[str, Any]:
        """Return `model_path`, `weight_version`, `max_context_length`, `num_running`, `num_waiting`, ..."""


@dataclass
class GenerateContext:
    """The argument of a generate function that declares the keyword `context`."""

    engine: RolloutEngine
    tokenizer: Any
    """HF tokenizer of `args.hf_checkpoint`."""
    evaluation: bool = False
    rollout_id: int | None = None
