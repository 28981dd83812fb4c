"""Save and load every rank's parts in one folder for any layout, with megatron.core.dist_checkpointing.

`checkpoint.py`, `load_model.py` and `convert.py` call it on every rank, inside `on_device`. Megatron's own writer forks
and starts a process for a queue. This hangs in a program without a `__main__` guard and copies the threads of rank 0's
engines. Here each rank writes its single file itself, flushed to the device. torch's checkpoint error is not an
`Exception`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slime_core.errors import CheckpointError


def metadata() -> dict[str, Any]:
    """Return the description options of parts, for `sharded_state_dict` of models and optimizers."""
    from megatron.core import parallel_state

    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        # Each layer has its own name, so that stages may hold any layers and may differ.
        "non_homogeneous_layers": True,
        # The only form of the optimizer's state that every layout can read: "dp_reshardable" loses the step counters.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }


def model_state(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return the parts of this rank's chunks, which share the model's tensors."""
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return {name: chunk.sharded_state_dict(metadata=metadata()) for name, chunk in zip(names, chunks)}


def save_model(chunks: Sequence[Any], folder: Path) -> None:
    """Write the weights of all ranks. The folder must exist and be empty."""
    save_parts(model_state(chunks), folder)


def load_model(chunks: Sequence[Any], folder: Path, *, optional: Collection[str] = ()) -> None:
    """Read the weights that `save_model` wrote, of any layout, into the chunks.

    Args:
        chunks: Model chunks of this rank, wrapped or not.
        folder: Folder with the weights.
        optional: Megatron names that may be missing or have another shape there; their weights then stay unchanged.

    Raises:
        CheckpointError: The weights do not fit the model, or cannot be read.
    """
    wanted = model_state(chunks)
    absent = _absent(wanted, folder, optional) if optional else set()
    for state in wanted.values():
        for name in absent & state.keys():
            del state[name]
    found = load_parts(wanted, folder)
    for name, chunk in zip(wanted, chunks, strict=True):
        result = chunk.load_state_dict(found[name], strict=not absent)
        assert result is None or set(result.missing_keys) <= absent | _extra(result.missing_keys)


def save_optimizer(parts: Sequence[Any], model: dict[str, Any], folder: Path) -> None:
    """Write the tensors of Megatron's optimizers. The folder must exist and be empty.

    Plain values (parameter groups, step counters) are not written: Megatron would store rank 0's values for all ranks,
    but the number of optimizers of a rank and their groups depend on its layout.

    Args:
        parts: Optimizers of this rank, for dense and for expert parameters.
        model: `sharded_state_dict` of the optimized model.
        folder: Folder for the files.
    """
    save_parts(_tensors(_optimizer_states(parts, model, loading=False)), folder)


def load_optimizer(parts: Sequence[Any], model: dict[str, Any], folder: Path) -> None:
    """Read the state that `save_optimizer` wrote with any layout; plain values stay unchanged.

    Raises:
        CheckpointError: The state is missing, has other shapes, or cannot be read.
    """
    states = _optimizer_states(parts, model, loading=True)
    found = load_parts(_tensors(states), folder)
    for number, part in enumerate(parts):
        part.load_state_dict(_filled(states[str(number)], found.get(str(number))))


def _optimizer_states(parts: Sequence[Any], model: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    described = {}
    for number, part in enumerate(parts):
        with _buckets_in_place(part):
            described[str(number)] = part.sharded_state_dict(model, is_loading=loading, metadata=metadata())
    return described


@contextmanager
def _buckets_in_place(part: Any) -> Iterator[None]:
    """Make a distributed optimizer collect its state with every bucket at its parameters' offsets.

    `get_parameter_state_dp_zero` (distrib_optimizer.py) leaves out the padding between buckets, but
    `sharded_param_state_fully_reshardable` looks parameters up at offsets with the padding. Parameters behind the first
    padding would be stored from wrong offsets. Megatron at most warns, and only about the last parameters.
    """
    if not hasattr(part, "gbuf_ranges"):
        yield
        return
    without_padding = part.get_parameter_state_dp_zero

    def with_padding(**options: Any) -> Any:
        state = without_padding(**options)
        for number, buffer in enumerate(part.buffers):
            for tensors in (state or {}).get(number, {}).values():
                for name, tensor in tensors.items():
                    if isinstance(tensor, torch.Tensor):
                        tensors[name] = _padded(tensor, buffer)
        return state

    part.get_parameter_state_dp_zero = with_padding
    try:
        yield
    finally:
        del part.get_parameter_state_dp_zero


def _padded(tensor: torch.Tensor, buffer: Any) -> torch.Tensor:
    """Insert the padding: [numbers of all buckets] -> [numbers of the buffer]."""
    if len(tensor) == buffer.numel:
        return tensor
    whole, start = tensor.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        stop = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = tensor[start:stop]
        start = stop
    return whole


def _tensors(described: dict[str, Any]) -> dict[str, Any]:
    """Return only the sharded entries, in the same hierarchy; lists become dicts by index."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    found: dict[str, Any] = extract_matching_values(described, lambda value: isinstance(value, ShardedBase), True)[0]
    return found


def _filled(described: Any, found: Any) -> Any:
    """Return `described` with the entries of `_tensors` replaced by those in `found`."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    if isinstance(described, ShardedBase):
        return found
    if isinstance(described, LocalNonpersistentObject):
        return described.unwrap()
    within: Any = dict(enumerate(found)) if isinstance(found, list) else found or {}
    if isinstance(described, dict):
        return {key: _filled(value, within.get(key)) for key, value in described.items()}
    if isinstance(described, list):
        return [_filled(value, within.get(index)) for index, value in enumerate(described)]
    return described


def save_parts(state: dict[str, Any], folder: Path) -> None:
    """Write the results of `sharded_state_dict` of all ranks.

    Raises:
        CheckpointError: Writing failed on some rank; raised on every rank.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    kept = {key: value for key, value in metadata().items() if key != "dp_cp_group"}
    try:
        dist_checkpointing.save(state, str(folder), _writer(), content_metadata=kept)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be written: {_first(error)}") from error


def load_parts(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read the parts that `save_parts` wrote; `state` describes the parts that this rank needs.

    Raises:
        CheckpointError: A part is missing, has another shape, or cannot be read.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        found: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be read: {_first(error)}") from error
    except (CheckpointingException, OSError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    return found


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the most frequent dtype of the weights in the folder. Raises CheckpointError if it cannot be read."""
    counts: Counter[torch.dtype] = Counter(tensor.dtype for tensor in _stored(folder).values())
    return max(counts, key=counts.__getitem__)


def _writer() -> Any:
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class InThisProcess(torch_strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """A save strategy that writes Megatron's format with torch's writer."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            """Write one file per rank; rank 0 also writes the index of the files."""
            named, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            save(
                torch_strategies.mcore_to_pyt_state_dict(named, False),
                storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True, overwrite=True),
                planner=torch_strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )

    return InThisProcess("torch_dist", 1)


def _absent(wanted: dict[str, Any], folder: Path, optional: Collection[str]) -> set[str]:
    """Return the optional names of this rank's state that are missing or different in the folder.

    Every rank reads the folder, so that an unreadable folder fails on all ranks.
    """
    there = _stored(folder)
    asked = {name: state[name] for state in wanted.values() for name in optional if name in state}
    return {
        name
        for name, tensor in asked.items()
        if tensor.key not in there or there[tensor.key].global_shape != tensor.global_shape
    }


def _stored(folder: Path) -> dict[str, Any]:
    """Return the content of the folder: name -> Megatron's description of a tensor, without its numbers."""
    from megatron.core import dist_checkpointing

    try:
        found: dict[str, Any] = dist_checkpointing.load_tensors_metadata(str(folder))
    except Exception as error:
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error
    return found


def _extra(names: Sequence[str]) -> set[str]:
    """Return the entries of modules without state to store."""
    return {name for name in names if name.endswith("_extra_state")}


def _first(error: Any) -> str:
    """Return the first rank's failure, on one line."""
    for rank, (failure, _) in sorted(error.failures.items()):
        return f"rank {rank}: {type(failure).__name__}: {failure}"
    return str(error)
