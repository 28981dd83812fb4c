"""Settings and a model's numbers -> bytes per device, by what they are for; arithmetic only, nothing is loaded.

    weights, gradients, optimizer   exact, from the tensors' sizes and the layout
    activations                     per token and layer what a backward pass needs (below)
    log-probs                       buffers of `chunk x vocabulary` floats (`slime_embedded.models.logprobs`)
    KV cache                        what may be in use at once, or the engine's limit

Activations of one token in one layer, in elements: 4 hidden (two norms, each with input and output) + 2 query + 2
key-value (attention's inputs and output) + 3 inner (gate, up, product); the counting of Korthikanti et al. (2022,
"Reducing Activation Recomputation in Large Transformer Models") for a layer with grouped queries, a gated block and
attention that keeps no scores. It is above what libraries take when they are imported, and allocators need some more
than is in use; measured peaks lie within FACTOR of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from slime_core.models.family import DecoderShape
from slime_core.protocols import Args

FACTOR = 2.0
"""Largest ratio between a measured peak and the estimate, either way (`tests/unit/commands/plan/test_memory.py`)."""
ENGINE_WEIGHTS = "engine weights"
_LOGIT_BUFFERS = 4
"""Buffers per chunk: logits, shifted logits, probabilities and their gradient."""
_UPDATE_BYTES = 8
"""Bytes per trained parameter of this rank during AdamW's update: two float32 temporaries."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a model."""

    total: int
    embeddings: int = 0
    """Parameters in the embedding and output matrices."""
    experts: int = 0
    """Parameters in routed experts."""

    @classmethod
    def of_directory(cls, directory: Path) -> Parameters:
        """Read the numbers from the headers of a model's safetensors files. Raises OSError, ValueError."""
        total = embeddings = experts = 0
        for path in sorted(directory.glob("*.safetensors")):
            for name, shape in _shapes(path):
                count = prod(shape)
                total += count
                if "embed_tokens" in name or name.startswith("lm_head"):
                    embeddings += count
                elif ".experts." in name:
                    experts += count
        return cls(total, embeddings, experts)


@dataclass(frozen=True)
class Sharding:
    """Layout and precision of a trainer's model."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data: int = 1
    fully: int = 1
    """Ranks over which every parameter, gradient and moment is divided (FSDP); layers are gathered for a pass."""
    sequence_parallel: bool = False
    weight_bytes: int = 4
    """Bytes of a parameter in the forward pass."""
    gradient_bytes: int = 4
    master_bytes: int = 0
    """Bytes of the optimizer's own copy of a parameter."""
    moment_bytes: int = 8
    """Bytes of both moments of a parameter."""
    spread_optimizer: bool = False
    """Whether moments and copies are divided over data-parallel ranks."""
    compute_bytes: int = 4
    """Bytes of an activation value."""

    def share(self, parameters: Parameters) -> float:
        """Return the number of parameters of the fullest rank."""
        inner = parameters.total - parameters.embeddings - parameters.experts
        own = inner / (self.tensor * self.pipeline) + parameters.embeddings / self.tensor
        return (own + parameters.experts / (self.expert * self.expert_tensor * self.pipeline)) / self.fully


@dataclass(frozen=True)
class Item:
    """A line of an estimate."""

    name: str
    bytes: float
    how: str
    """Description of the arithmetic."""
    idle: float = 0.0
    """Bytes that stay while the other side works."""
    offloaded: float = 0.0
    """Bytes that stay while the item's side is offloaded."""


def kept(name: str, num_bytes: float, how: str, *, offloaded: float | None = None) -> Item:
    """Return an item that its side holds permanently; `offloaded` bytes (None: all) stay after an offload."""
    return Item(name, num_bytes, how, num_bytes, num_bytes if offloaded is None else offloaded)


def trainer_items(
    args: Args,
    parameters: Parameters,
    shape: DecoderShape,
    sharding: Sharding,
    *,
    longest: int,
    frozen: int = 0,
    teachers: Sequence[Parameters] = (),
    critic: bool = False,
    chunk_elements: int = 4 << 20,
    gpu: bool = False,
) -> list[Item]:
    """Return the memory of a device of the trainer.

    Args:
        args: The run's settings.
        parameters: Parameters of the model.
        shape: Shape of the model.
        sharding: Sharding of the trainer.
        longest: Tokens of the longest sample, prompt included.
        frozen: Number of models of its size besides the trained one (reference, old actor).
        teachers: Parameters of each teacher.
        critic: Whether a second trained model shares the device.
        chunk_elements: Bound on chunk x vocabulary of the log-probs.
        gpu: The device is one, so `--offload-train` moves the moments off it; gradients are freed everywhere.
    """
    own = sharding.share(parameters)
    trained = own
    if args.lora_rank is not None:
        adapters = (1 + len(args.lora_adapters)) * lora_parameters(shape, args.lora_rank)
        trained = adapters / (sharding.tensor * sharding.fully)
    copies = 1 + critic
    held = own * sharding.weight_bytes + (trained * sharding.weight_bytes if args.lora_rank is not None else 0)
    spread = sharding.data if sharding.spread_optimizer else 1
    moments = 0 if args.use_stateless_adam else sharding.moment_bytes
    optimizer = trained * (sharding.master_bytes + moments) / spread
    over = f" / {spread} data-parallel ranks" if spread > 1 else ""
    items = [
        kept("weights", copies * held, f"{own:,.0f} x {sharding.weight_bytes} B" + (" x 2 (critic)" if critic else "")),
        kept(
            "gradients",
            copies * trained * sharding.gradient_bytes,
            f"{trained:,.0f} x {sharding.gradient_bytes} B",
            offloaded=0.0,
        ),
        kept(
            "optimizer",
            copies * optimizer,
            f"{trained:,.0f} x ({sharding.master_bytes} copy + {moments} moments) B{over}",
            offloaded=copies * trained * sharding.master_bytes / spread if gpu else None,
        ),
    ]
    if frozen and args.lora_rank is None:
        items.append(kept("frozen models", frozen * own * sharding.weight_bytes, f"{frozen} x weights"))
    if teachers:
        shares = [sharding.share(teacher) for teacher in teachers]
        how = f"{' + '.join(f'{share:,.0f}' for share in shares)} x {sharding.weight_bytes} B"
        items.append(kept("teachers", sum(shares) * sharding.weight_bytes, how))
    tokens = micro_batch_tokens(args, longest, sharding.context)
    working = activation_items(args, shape, sharding, tokens, chunk_elements)
    if sharding.fully > 1:
        working = [*working, gathered_item(args, parameters, shape, sharding)]
    update = trained * _UPDATE_BYTES / spread
    if update > sum(item.bytes for item in working):
        working = [
            Item("optimizer's update", update, f"{trained:,.0f} x {_UPDATE_BYTES} B{over}, more than a backward")
        ]
    return items + working


def gathered_item(args: Args, parameters: Parameters, shape: DecoderShape, sharding: Sharding) -> Item:
    """Return the memory of the parts that a rank gathers for a pass: embeddings, a layer and the next one."""
    layer = (parameters.total - parameters.embeddings) / shape.num_layers
    gradients = 0.0 if args.lora_rank is not None else parameters.embeddings + layer
    elements = parameters.embeddings + 2 * layer + gradients
    how = f"{elements:,.0f} x {sharding.weight_bytes} B: embeddings, two layers, gradients of one"
    return Item("gathered layers", elements * sharding.weight_bytes, how)


def activation_items(
    args: Args, shape: DecoderShape, sharding: Sharding, tokens: int, chunk_elements: int
) -> list[Item]:
    """Return the memory of one forward and backward pass over `tokens` tokens."""
    whole, split = shape.activations
    cut = sharding.tensor if sharding.sequence_parallel else 1
    layer = (whole / cut + split / sharding.tensor) * sharding.compute_bytes
    local = tokens / sharding.context
    # The first stage holds the micro-batches of all stages at once, each of its own layers: the sum is all layers.
    layers = shape.num_layers
    if args.recompute_granularity == "full":
        kept = layers * shape.hidden_size / cut * sharding.compute_bytes + 2 * layer
        how = f"{local:,.0f} tokens x ({layers} layers' inputs + one layer and its gradients)"
    else:
        kept = (layers + 1) * layer
        how = f"{local:,.0f} tokens x ({layers} layers + one layer's gradients) x {layer:,.0f} B"
    rows = args.log_probs_chunk_size if args.log_probs_chunk_size > 0 else max(1, chunk_elements // shape.vocab_size)
    rows = min(rows, tokens)
    logits = _LOGIT_BUFFERS * rows * shape.vocab_size / sharding.tensor * 4
    return [
        Item("activations", local * kept, how),
        Item("log-probs", logits, f"{_LOGIT_BUFFERS} x {rows} rows x {shape.vocab_size:,} x 4 B"),
    ]


def engine_items(
    parameters: Parameters,
    shape: DecoderShape,
    *,
    size: int,
    dtype_bytes: int,
    running: int,
    longest: int,
    limit: int | None = None,
    share: float | None = None,
    models: int = 1,
) -> list[Item]:
    """Return the memory of a device of an engine.

    Args:
        parameters: Parameters of the model.
        shape: Shape of the model.
        size: Number of devices that share the engine.
        dtype_bytes: Bytes of an element of weights and cache.
        running: Number of concurrent samples.
        longest: Tokens of the longest sample, prompt included.
        limit: Largest number of tokens in the cache.
        share: Bytes of a device that the engine takes at most; samples that its cache has no room for wait.
        models: Number of models that it serves: one with each adapter.
    """
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype_bytes
    tokens = min(running * longest, limit) if limit else running * longest
    how = "at most"
    if share is not None:
        room = max(0, int((share * size - models * parameters.total * dtype_bytes) / per_token))
        if room < tokens:
            tokens, how = room, f"for {room // longest} of {running} samples at full length; the rest waits"
    return [
        kept(
            ENGINE_WEIGHTS,
            models * parameters.total * dtype_bytes / size,
            f"{parameters.total:,} x {dtype_bytes} B / {size}" + (f" x {models} (adapters)" if models > 1 else ""),
            offloaded=0.0,
        ),
        kept(
            "KV cache",
            tokens * per_token / size,
            f"{tokens:,} tokens x {per_token:,} B / {size}, {how}",
            offloaded=0.0,
        ),
    ]


def phase_items(
    training: Sequence[Item], generating: Sequence[Item], *, offload_train: bool, offload_rollout: bool, overlap: bool
) -> list[Item]:
    """Return the memory of a device that both sides share, per phase of a step (`launch.drive`); the largest counts.

    Args:
        training: Memory of the trainer.
        generating: Memory of the engine.
        offload_train: Whether the trainer releases memory that only training needs, while it does not train.
        offload_rollout: Whether the engine releases its memory while the trainer works.
        overlap: Whether both work at the same time (`--async`), so neither is ever idle.
    """
    busy, engine = total(training), total(generating)
    if overlap:
        return [Item("generate and train", busy + engine, f"trainer {shown(busy)} + engine {shown(engine)}")]
    idle = sum(item.offloaded if offload_train else item.idle for item in training)
    resting = sum(item.offloaded if offload_rollout else item.idle for item in generating)
    weights = sum(item.bytes for item in generating if item.name == ENGINE_WEIGHTS)
    pushed = weights if offload_rollout else engine

    def phase(name: str, trainer: float, engine: float, why: str) -> Item:
        return Item(name, trainer + engine, f"trainer {shown(trainer)} + engine {shown(engine)}{why}")

    rests = " (offloaded)" if offload_train else " (idle)"
    return [
        phase("generate", idle, engine, f"; the trainer{rests}"),
        phase("train", busy, resting, f"; the engine{' (offloaded)' if offload_rollout else ' (idle)'}"),
        phase("push weights", idle, pushed, "; the engine without its KV cache" if offload_rollout else ""),
    ]


def micro_batch_tokens(args: Args, longest: int, context: int = 1) -> int:
    """Return the largest number of tokens of a micro-batch over its context-parallel ranks."""
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        return max(int(args.max_tokens_per_gpu) * context, longest)
    return (args.micro_batch_size or 1) * longest


def lora_parameters(shape: DecoderShape, rank: int) -> int:
    """Return the number of parameters of adapters at every linear layer."""
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    per_layer = (hidden + query) * 2 + (hidden + key_value) * 2 + (hidden + inner) * 3
    return shape.num_layers * rank * per_layer


def total(items: Sequence[Item]) -> float:
    """Return the sum of the items' bytes."""
    return sum(item.bytes for item in items)


def shown(num_bytes: float) -> str:
    """Format bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} {unit}" if num_bytes >= 100 or unit == "B" else f"{num_bytes:.3g} {unit}"


def _shapes(path: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield names and shapes of a safetensors file, whose header is an 8-byte length and JSON of that length.

    Raises OSError, ValueError.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not length or length > path.stat().st_size:
            raise ValueError(f"{path} has no header of safetensors")
        header: Mapping[str, Any] = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, entry["shape"]
