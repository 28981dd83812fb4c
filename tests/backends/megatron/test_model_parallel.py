"""One model in many layouts: the logits of packed sequences are those of transformers on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_trainer_megatron.arguments.config import transformer_config
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.model.build import build_model
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.weights.weights_in import load_hf

from slime_core.config import Args
from tests.backends.megatron.ranks import RankPool
from tests.megatron_models import family, save_tiny

pytestmark = pytest.mark.backends

HERE = "tests.backends.megatron.test_model_parallel"
CPU = torch.device("cpu")
# Divisible by 4, the chunks of two context-parallel ranks, and in sum by 8 for the ranks of sequence parallelism.
LENGTHS = [8, 4, 16, 4]
VOCABULARY = 61

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "tp2-sp": (2, {"tensor": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-vpp2": (2, {"pipeline": 2, "virtual": 2}),
    "cp2": (2, {"context": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2}),
    "tp2-sp-cp2": (4, {"tensor": 2, "context": 2, "sequence_parallel": True}),
    "ep2-tp2-sp": (4, {"expert": 2, "tensor": 2, "sequence_parallel": True}),
}
CASES = [
    *(("llama", layout) for layout in ("tp2", "pp2")),
    *(("qwen2-tied", layout) for layout in ("tp2", "pp2", "pp2-vpp2", "cp2", "tp2-pp2")),
    *(("qwen3", layout) for layout in LAYOUTS if "ep2" not in layout),
    *(("qwen3-moe", layout) for layout in ("tp2-sp", "pp2-vpp2", "cp2", "ep2", "ep2-tp2-sp")),
]


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def run(
    directory: str, layout: dict[str, Any], role: Any = "actor", flags: dict[str, Any] | None = None
) -> tuple[Any, Any, torch.Tensor | None]:
    """(groups, chunks, this rank's output [tokens of its context part, rows of its vocabulary part] or None)."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func

    wanted = Layout(**layout)
    groups = ProcessGroups(wanted, "cpu", timeout_minutes=1)
    args, model = Args(hf_checkpoint=directory, **(flags or {})), family(Path(directory), role)
    config = transformer_config(args, model.architecture, wanted, role=role, device=CPU)
    chunks = build_model(args, model, config, wanted, role=role)
    load_hf(chunks, model, directory, missing_ok=lambda name: name.startswith("score."))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    params = PackedSeqParams("thd", starts, starts, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    ids = torch.cat([own_part(sequence, groups) for sequence in sequences()])[None]
    positions = torch.cat([own_part(torch.arange(length), groups) for length in LENGTHS])[None]
    outputs = []

    def step(_: Any, chunk: Any) -> Any:
        output = chunk(ids, positions, None, packed_seq_params=params)
        return output, lambda logits, non_loss_data=True: outputs.append(logits[0])

    with torch.no_grad(), on_device(CPU):
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=wanted.micro_batch_multiple,
            seq_length=sum(LENGTHS),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return groups, chunks, outputs[0] if outputs else None


def own_part(whole: torch.Tensor, groups: ProcessGroups) -> torch.Tensor:
    """Chunks r and 2 * size - 1 - r of a sequence."""
    if groups.context_size == 1:
        return whole
    chunks = whole.chunk(2 * groups.context_size)
    return torch.cat((chunks[groups.context_rank], chunks[-1 - groups.context_rank]))


def difference(directory: str, layout: dict[str, Any], expected: list[torch.Tensor], **options: Any) -> float | None:
    groups, chunks, logits = run(directory, layout, **options)
    if logits is None:
        return None
    whole = torch.cat([own_part(sequence, groups) for sequence in expected])
    rows = logits.shape[1]
    assert rows * groups.tensor_size == chunks[-1].vocab_size >= chunks[-1].unpadded_vocab_size == VOCABULARY
    own = whole[:, groups.tensor_rank * rows :][:, :rows]
    return float((logits[:, : own.shape[1]] - own).abs().max())


def values(directory: str, layout: dict[str, Any]) -> Any:
    groups, chunks, found = run(directory, layout, role="critic")
    assert groups.is_last_stage == (found is not None)
    if found is None:
        return None
    head = chunks[-1].output_layer
    assert not found.any(), "a fresh head gives zeros"
    assert head.weight.sequence_parallel is layout.get("sequence_parallel", False)
    return list(found.shape)


@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_logits_are_those_of_transformers(
    ranks: Callable[[int], RankPool], tmp_path: Path, variant: str, layout: str
) -> None:
    reference = save_tiny(tmp_path, variant)
    with torch.no_grad():
        expected = [reference(sequence[None]).logits[0] for sequence in sequences()]
    size, settings = LAYOUTS[layout]
    found = ranks(size).run(f"{HERE}:difference", directory=str(tmp_path), layout=settings, expected=expected)
    last_stage = [difference for difference in found if difference is not None]
    assert len(last_stage) == size // settings.get("pipeline", 1)
    assert max(last_stage) < 1e-5


@pytest.mark.parametrize("layout", ["pp2", "pp2-vpp2", "tp2-sp-cp2"])
def test_a_critic_gives_values_on_the_last_stage(ranks: Callable[[int], RankPool], tmp_path: Path, layout: str) -> None:
    save_tiny(tmp_path, "qwen2-tied")
    size, settings = LAYOUTS[layout]
    found = [shape for shape in ranks(size).run(f"{HERE}:values", directory=str(tmp_path), layout=settings) if shape]
    own_tokens = sum(LENGTHS) // settings.get("context", 1)
    assert found == [[own_tokens, 1]] * (size // settings.get("pipeline", 1))


def attention_gradients(size: int) -> dict[str, float]:
    """Core attention over `size` context-parallel ranks against the same on the whole sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType
    from slime_trainer_megatron.model.attention import CoreAttention

    groups = ProcessGroups(Layout(context=size), "cpu", timeout_minutes=1)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0)
    over_ranks, alone = (CoreAttention(config, 1, AttnMaskType.causal, "self") for _ in range(2))
    alone.context_group = groups.tensor_group
    lengths = [4 * size, 2 * size, 6 * size]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    params = PackedSeqParams("thd", starts, starts)
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 8), (2, 8), (2, 6), (24,))
    *whole, direction = (torch.randn(sum(lengths), *shape, generator=generator) for shape in shapes)

    def part(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([own_part(sequence, groups) for sequence in x.split(lengths)])

    own = [part(x).requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]
    found, expected = over_ranks(*own, None, packed_seq_params=params), alone(*whole, None, packed_seq_params=params)
    found.backward(part(direction))
    expected.backward(direction)
    pairs = {"output": (found, expected)} | {
        name: (mine.grad, all_.grad) for name, mine, all_ in zip(("query", "key", "value"), own, whole, strict=True)
    }
    return {name: float((mine - part(all_)).abs().max()) for name, (mine, all_) in pairs.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_attention_over_context_ranks_and_its_gradients(ranks: Callable[[int], RankPool], size: int) -> None:
    for found in ranks(size).run(f"{HERE}:attention_gradients", size=size):
        assert max(found.values()) < 1e-5, found
