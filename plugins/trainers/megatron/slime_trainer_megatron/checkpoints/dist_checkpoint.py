"""megatron.core.dist_checkpointing as this trainer uses it: every rank's parts <-> one folder, whatever the layout.

`checkpoint.py`, `load_model.py` and `convert.py` call it on every rank, inside `on_device`. Megatron's own writer
forks, and starts a process for a queue, which hangs in a program without a `__main__` guard and copies the threads of
rank 0's engines; here each rank writes its one file itself, flushed to the device. torch's checkpoint error is no
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
    """How parts are described; `sharded_state_dict` of models and optimizers take it."""
    from megatron.core import parallel_state

    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        # Layers under their own names, so that stages may hold any of them and need not be alike.
        "non_homogeneous_layers": True,
        # The one form of the optimizer's state that every layout can read: "dp_reshardable" loses the step counters.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }


def model_state(chunks: Sequence[Any]) -> dict[str, Any]:
    """The parts of this rank's chunks, in the tensors of the model themselves."""
    names = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
    return {name: chunk.sharded_state_dict(metadata=metadata()) for name, chunk in zip(names, chunks)}


def save_model(chunks: Sequence[Any], folder: Path) -> None:
    """Write the weights of all ranks. The folder is there, and empty."""
    save_parts(model_state(chunks), folder)


def load_model(chunks: Sequence[Any], folder: Path, *, optional: Collection[str] = ()) -> None:
    """Read the weights that `save_model` wrote, of any layout, into the chunks.

    Args:
        chunks: Of this rank; wrapped or not.
        folder: With the weights.
        optional: Megatron names that may be missing or of another shape there, and are then left as they are.

    Raises:
        CheckpointError: They do not fit the model, or cannot be read.
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
    """Write the tensors of Megatron's optimizers. The folder is there, and empty.

    Their plain values (parameter groups, step counters) stay behind: Megatron would store rank 0's for all, but how
    many optimizers a rank has, and which groups are in them, depends on its layout.

    Args:
        parts: Of this rank, one of dense and one of expert parameters.
        model: From `sharded_state_dict` of what they optimize.
        folder: For the files.
    """
    save_parts(_tensors(_optimizer_states(parts, model, loading=False)), folder)


def load_optimizer(parts: Sequence[Any], model: dict[str, Any], folder: Path) -> None:
    """Read what `save_optimizer` wrote, of any layout; plain values stay as they are here.

    Raises:
        CheckpointError: It is not there, has other shapes, or cannot be read.
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
    """Where a distributed optimizer collects its state, put every bucket where its parameters' numbers say.

    `get_parameter_state_dp_zero` (distrib_optimizer.py) leaves out the padding between buckets, and
    `sharded_param_state_fully_reshardable` looks parameters up with it: those behind the first padding would be stored
    from the wrong place. Megatron says so at most in a warning, and only about the last parameters.
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
    """[numbers of all buckets] -> [numbers of the buffer]."""
    if len(tensor) == buffer.numel:
        return tensor
    whole, start = tensor.new_zeros(buffer.numel), 0
    for bucket in buffer.buckets:
        stop = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = tensor[start:stop]
        start = stop
    return whole


def _tensors(described: dict[str, Any]) -> dict[str, Any]:
    """What has parts on several ranks, in the hierarchy of the whole; lists become dicts of their indices."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    found: dict[str, Any] = extract_matching_values(described, lambda value: isinstance(value, ShardedBase), True)[0]
    return found


def _filled(described: Any, found: Any) -> Any:
    """`described` with what was `found` in the places of `_tensors`."""
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
    """Write what `sharded_state_dict` gave, of all ranks.

    Raises:
        CheckpointError: The file system refused on some rank; on every rank.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    kept = {key: value for key, value in metadata().items() if key != "dp_cp_group"}
    try:
        dist_checkpointing.save(state, str(folder), _writer(), content_metadata=kept)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: cannot be written: {_first(error)}") from error


def load_parts(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The counterpart of `save_parts`: `state` says what this rank needs.

    Raises:
        CheckpointError: It is not there, has other shapes, or cannot be read.
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
    """Of most weights in the folder. Raises CheckpointError when it cannot be read."""
    counts: Counter[torch.dtype] = Counter(tensor.dtype for tensor in _stored(folder).values())
    return max(counts, key=counts.__getitem__)


def _writer() -> Any:
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class InThisProcess(torch_strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Megatron's format by torch's writer."""

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            """Every rank writes one file; rank 0 also what is in which."""
            named, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            save(
                torch_strategies.mcore_to_pyt_state_dict(named, False),
                storage_writer=FileSystemWriter(checkpoint_dir, sync_files=True, overwrite=True),
                planner=torch_strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
            )

    return InThisProcess("torch_dist", 1)


def _absent(wanted: dict[str, Any], folder: Path, optional: Collection[str]) -> set[str]:
    """Names of this rank's state that are optional and not in the folder as they are here. Every rank reads the folder,
    so that one that cannot be read fails on all of them."""
    there = _stored(folder)
    asked = {name: state[name] for state in wanted.values() for name in optional if name in state}
    return {
        name
        for name, tensor in asked.items()
        if tensor.key not in there or there[tensor.key].global_shape != tensor.global_shape
    }


def _stored(folder: Path) -> dict[str, Any]:
    """What is in the folder: name -> Megatron's description of a tensor, without its numbers."""
    from megatron.core import dist_checkpointing

    try:
        found: dict[str, Any] = dist_checkpointing.load_tensors_metadata(str(folder))
    except Exception as error:
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error
    return found


def _extra(names: Sequence[str]) -> set[str]:
    """Entries of modules that have nothing to store."""
    return {name for name in names if name.endswith("_extra_state")}


def _first(error: Any) -> str:
    """The first rank's failure, on one line."""
    for rank, (failure, _) in sorted(error.failures.items()):
        return f"rank {rank}: {type(failure).__name__}: {failure}"
    return str(error)
