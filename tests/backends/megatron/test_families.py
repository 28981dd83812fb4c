"""Families with modules of their own on Megatron: logits, gradients and weights are those of transformers.

Tiny random models with norms, biases and the bias of experts away from their initial values, over one process and
two. What goes in and out is in HF's names: `load_hf` reads the files, `hf_weights` gives weights and gradients back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_trainer_megatron.arguments.config import ddp_config, transformer_config
from slime_trainer_megatron.cpu_mode import on_device
from slime_trainer_megatron.families import load_megatron_model
from slime_trainer_megatron.layout import Layout
from slime_trainer_megatron.model.build import build_model
from slime_trainer_megatron.process_groups import ProcessGroups
from slime_trainer_megatron.step.forward import finalize
from slime_trainer_megatron.weights.weights_in import load_hf
from slime_trainer_megatron.weights.weights_out import hf_weights

from slime_core.config import Args
from slime_core.models.hf_io import read_weights
from tests.backends.megatron import trainer_jobs as jobs
from tests.backends.megatron.ranks import RankError, RankPool

pytestmark = pytest.mark.backends

HERE = "tests.backends.megatron.test_families"
VOCAB = 96
LENGTHS = (12, 72, 4, 20)
"""Of the sequences; multiples of four for context parallelism, one longer than YaRN's original context."""
UNEVEN = (70, 1, 131, 5, 65)
"""For linear attention, which works on chunks of 64 tokens."""

TINY = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "tie_word_embeddings": False,
    "pad_token_id": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 0.8, "original_max_position_embeddings": 64,
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GROUPS = {"n_group": 4, "topk_group": 2}

LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    "mlp_only_layers": [1],
}  # fmt: skip
NARROW = {"head_dim": 16, "initializer_range": 0.05}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4": ("glm4", {"head_dim": 8, "rope_parameters": HALF}),
    "glm4-32b": ("glm4", {"head_dim": 16, "attention_bias": False, "rope_parameters": HALF}),
    "glm4.5": (
        "glm4_moe",
        {**EXPERTS, "head_dim": 16, "attention_bias": True, "use_qk_norm": True, "rope_parameters": HALF},
    ),
    "glm4.5-air": ("glm4_moe", {**EXPERTS, **GROUPS, "head_dim": 8, "attention_bias": True, "rope_parameters": HALF}),
    "glm4.7-flash": (
        "glm4_moe_lite",
        {**EXPERTS, **LATENT, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "rms_norm_eps": 1e-2},
    ),
    "deepseek-v3": ("deepseek_v3", {**EXPERTS, **LATENT, **GROUPS, "rope_parameters": YARN}),
    "deepseek-v3-no-mscale": (
        "deepseek_v3",
        {**EXPERTS, **LATENT, "rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    ),
    "deepseek-v3-dense": ("deepseek_v3", {**EXPERTS, **LATENT, "first_k_dense_replace": 4, "rope_parameters": YARN}),
    "moonlight": ("deepseek_v3", {**EXPERTS, **LATENT, "q_lora_rank": None, "rms_norm_eps": 1e-2}),
    "kimi-k2": (
        "deepseek_v3",  # whose tensors and arithmetic it has; `model_type` is changed in the file
        {**EXPERTS, **LATENT, "n_routed_experts": 12, "rope_parameters": {**YARN, "beta_fast": 1, "mscale_all_dim": 1}},
    ),
    "qwen3-next": ("qwen3_next", {**NARROW, **LINEAR}),
    "qwen3-next, ranks share key heads": ("qwen3_next", {**NARROW, **LINEAR, "num_key_value_heads": 1}),
    "minimax-m2": (
        "minimax_m2",
        {**NARROW, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
}


def lengths_of(name: str) -> tuple[int, ...]:
    """Return the lengths of the sequences for a model."""
    return UNEVEN if "initializer_range" in MODELS[name][1] else LENGTHS


def sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def weighting(number: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """[length, vocabulary]: the loss of sequence `number` is the sum of its logits so weighed."""
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(lengths[number], VOCAB, generator=generator) / sum(lengths)


def save(name: str, directory: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Write a tiny model of transformers; its logits per sequence, and its gradients under the names of the files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, change = MODELS[name]
    lengths = lengths_of(name)
    config = AutoConfig.for_model(model_type, **deepcopy({**TINY, **change}))  # it writes into what it is given
    build: Any = AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    experts = {"experts_implementation": "eager"} if lengths is UNEVEN else {}
    reference = build(config, attn_implementation="eager", **experts)
    with torch.no_grad():
        for tensor in (*reference.parameters(), *reference.buffers()):
            if tensor.is_floating_point() and tensor.dim() == 1 and tensor.shape[0] > 4:  # not rotary frequencies
                tensor.add_(0.2 * torch.randn(tensor.shape))
    reference.save_pretrained(directory)
    logits = [reference(ids[None]).logits[0] for ids in sequences(lengths)]
    sum((weighting(i, lengths) * found).sum() for i, found in enumerate(logits)).backward()  # type: ignore[union-attr]
    of_gradients = build(config)
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        for parameter_name, parameter in of_gradients.named_parameters():
            grad = theirs[parameter_name].grad
            parameter.zero_() if grad is None else parameter.copy_(grad)
    of_gradients.save_pretrained(directory / "gradients")
    if name == "kimi-k2":
        settings = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**settings, "model_type": "kimi_k2"}))
    gradients = dict(read_weights(directory / "gradients"))
    return [found.detach() for found in logits], {n: g for n, g in gradients.items() if "score_correction" not in n}


def run(directory: str, layout: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """One rank: load, forward and backward over its data-parallel part of the sequences, give everything back."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.packed_seq_params import PackedSeqParams

    device, args, places = torch.device("cpu"), Args(hf_checkpoint=directory), Layout(**layout)
    groups = ProcessGroups(places, "cpu")
    model = load_megatron_model(directory)
    config = transformer_config(args, model.architecture, places, device=device)
    chunks = build_model(args, model, config, places)
    assert load_hf(chunks, model, directory) == []
    weights = dict(hf_weights(chunks, model, bucket_bytes=20_000))
    if places.pipeline > 1:
        return {"weights": weights}
    mine = range(groups.data_rank, len(lengths), groups.data_size)
    own = {i: own_positions(lengths[i], groups.context_rank, groups.context_size) for i in mine}
    starts = torch.tensor([0, *(lengths[i] for i in mine)]).cumsum(0).int()
    longest = max(lengths[i] for i in mine)
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    with on_device("cpu"):
        # The distributed optimizer's reduce-scatter would leave each data-parallel rank a part of the gradients.
        whole = dataclasses.replace(ddp_config(args, device=device), use_distributed_optimizer=False)
        wrapped = DistributedDataParallel(config, whole, chunks[0])
        wrapped.zero_grad_buffer()
        ids = torch.cat([sequences(lengths)[i][own[i]] for i in mine])
        logits = wrapped(ids[None], torch.cat(list(own.values()))[None], None, packed_seq_params=packed)[0]
        columns = slice(groups.tensor_rank * logits.shape[-1], (groups.tensor_rank + 1) * logits.shape[-1])
        (logits * torch.cat([weighting(i, lengths)[own[i]] for i in mine])[:, columns]).sum().backward()
        finalize([wrapped])
    gradients = dict(hf_weights(chunks, model, what=lambda p: getattr(p, "main_grad", None)))
    parts = [torch.empty_like(logits) for _ in range(places.tensor)]
    torch.distributed.all_gather(parts, logits.detach().contiguous(), parallel_state.get_tensor_model_parallel_group())
    groups.close()
    by_sequence = torch.cat(parts, -1).split([len(positions) for positions in own.values()])
    return {"logits": list(zip(mine, own.values(), by_sequence)), "weights": weights, "gradients": gradients}


def own_positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Of a context-parallel rank: two of the sequence's `2 * size` chunks, one from each end."""
    if size == 1:
        return torch.arange(length)
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


ONE = ({}, 1)
TP2 = ({"tensor": 2}, 2)
SP2 = ({"tensor": 2, "sequence_parallel": True}, 2)
CP2 = ({"context": 2}, 2)
EP2 = ({"expert": 2}, 2)
EP2_SP2 = ({"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1}, 2)
OTHERS = [name for name, (_, entries) in MODELS.items() if "initializer_range" in entries]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, ONE) for name in MODELS),
        *((name, TP2) for name in ("glm4", "deepseek-v3-dense")),
        *((name, SP2) for name in ("glm4", "glm4.5", "glm4.5-air", "deepseek-v3", "moonlight")),
        *((name, CP2) for name in ("glm4", "deepseek-v3")),
        *((name, EP2) for name in ("glm4.5", "glm4.7-flash", "deepseek-v3", "kimi-k2")),
        *((name, place) for name in OTHERS for place in (SP2, EP2, EP2_SP2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[0]) or "one",
)
def test_logits_gradients_and_weights_are_those_of_transformers(
    ranks: Callable[[int], RankPool], tmp_path: Path, name: str, place: tuple[dict[str, Any], int]
) -> None:
    logits, gradients = save(name, tmp_path)
    layout, size = place
    lengths = lengths_of(name)
    answers = ranks(size).run(f"{HERE}:run", directory=str(tmp_path), layout=layout, lengths=lengths)
    files = dict(read_weights(tmp_path))
    weights = answers[0]["weights"]
    assert weights.keys() == files.keys()
    assert all(torch.equal(weights[key], files[key]) for key in files)
    compared: set[tuple[int, int]] = set()
    for answer in answers:
        for number, positions, found in answer["logits"]:
            expected = logits[number][positions]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)
            compared |= {(number, int(position)) for position in positions}
    assert len(compared) == sum(lengths)
    found = answers[0]["gradients"]
    assert found.keys() == gradients.keys()
    for key, expected in gradients.items():
        # The floor of linear attention is for decays, whose gradients nearly cancel over tokens.
        nearest = max(2e-5 * max(float(expected.abs().max()), 1e-3), 4e-7 if lengths is UNEVEN else 0)
        torch.testing.assert_close(found[key], expected, rtol=0, atol=nearest, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["glm4", "glm4.5", "deepseek-v3", *OTHERS])
@pytest.mark.parametrize("layout", [{"pipeline": 2}, {"pipeline": 2, "virtual": 2}], ids=["pp2", "vpp2"])
def test_weights_come_back_bitwise_over_a_pipeline(
    ranks: Callable[[int], RankPool], tmp_path: Path, name: str, layout: dict[str, Any]
) -> None:
    save(name, tmp_path)
    given = {"directory": str(tmp_path), "layout": layout, "lengths": lengths_of(name)}
    weights = ranks(2).run(f"{HERE}:run", **given)[0]["weights"]
    files = dict(read_weights(tmp_path))
    assert weights.keys() == files.keys()
    assert all(torch.equal(weights[key], files[key]) for key in files)


def summed_gradient_of_a_part() -> tuple[float, float]:
    """A part of a concatenation, whose gradient is not contiguous, through Megatron's sum over ranks and ours."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
    from slime_trainer_megatron.model.latent_attention import _SumGradient

    groups = ProcessGroups(Layout(tensor=2), "cpu")
    group = parallel_state.get_tensor_model_parallel_group()
    x = torch.zeros(3, 4, requires_grad=True)
    found = []
    for identity in (copy_to_tensor_model_parallel_region, _SumGradient.apply):
        whole = torch.cat([x[:, :2], identity(x[:, 2:], group)], -1)
        (gradient,) = torch.autograd.grad((whole * (1 + groups.rank)).sum(), x)
        found.append(float(gradient[0, 3]))
    groups.close()
    return found[0], found[1]


def test_megatron_still_loses_sums_of_gradients_that_are_not_contiguous(ranks: Callable[[int], RankPool]) -> None:
    """When this fails, `_SumGradient` can go: Megatron's own function then does the same."""
    assert ranks(2).run(f"{HERE}:summed_gradient_of_a_part") == [(1.0, 3.0), (2.0, 3.0)]


# -- linear attention, and norms over all heads --------------------------------------------------------------------


@pytest.fixture(scope="module", params=OTHERS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save(request.param, directory)
    return directory


def through_checkpoint(directory: str, layout: dict[str, Any], checkpoint: str, write: bool) -> dict[str, torch.Tensor]:
    """Write a checkpoint of the files' weights, or read one into random ones; what is exported."""
    from slime_trainer_megatron.checkpoints.dist_checkpoint import load_parts, metadata, save_parts

    args, place, cpu = Args(hf_checkpoint=directory), Layout(**layout), torch.device("cpu")
    groups = ProcessGroups(place, "cpu")
    model = load_megatron_model(directory)
    chunks = build_model(args, model, transformer_config(args, model.architecture, place, device=cpu), place)
    if write:
        load_hf(chunks, model, directory)
    with on_device(cpu):
        sharded = chunks[0].sharded_state_dict(metadata=metadata())
        if write:
            save_parts(sharded, Path(checkpoint))
        else:
            chunks[0].load_state_dict(load_parts(sharded, Path(checkpoint)), strict=False)
    groups.barrier()
    return dict(hf_weights(chunks, model))


def test_a_checkpoint_of_one_layout_is_read_by_another(
    ranks: Callable[[int], RankPool], saved: Path, tmp_path: Path
) -> None:
    job = {"directory": str(saved), "checkpoint": str(tmp_path)}
    ranks(2).run(f"{HERE}:through_checkpoint", **job, layout=SP2[0], write=True)
    original = dict(read_weights(saved))
    for world, layout in ((1, {}), (2, {"pipeline": 2})):
        read = ranks(world).run(f"{HERE}:through_checkpoint", **job, layout=layout, write=False)[0]
        assert all(torch.equal(read[name], original[name]) for name in original)


TRAINED: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_model_parallel_size": 2},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "data": {},
    "recompute": {"pipeline_model_parallel_size": 2, "recompute_granularity": "full"},
}


@pytest.fixture(scope="module")
def on_one_rank(ranks: Callable[[int], RankPool], saved: Path) -> dict[str, Any]:
    """Three steps of the trainer in one process."""
    (found,) = ranks(1).run(f"{jobs.__name__}:megatron", model=str(saved))
    return found


@pytest.mark.parametrize("layout", sorted(TRAINED))
def test_three_steps_are_those_of_one_rank(
    ranks: Callable[[int], RankPool], saved: Path, on_one_rank: dict[str, Any], layout: str
) -> None:
    answers = ranks(2).run(f"{jobs.__name__}:megatron", model=str(saved), **TRAINED[layout])
    for answer in answers:
        part, _ = jobs.shares(2 if layout == "data" else 1)[answer["rank"]]
        for name in ("log_probs", "entropy", "after"):
            for found, position in zip(answer[name], part, strict=True):
                torch.testing.assert_close(found, on_one_rank[name][position], rtol=0, atol=2e-4)
        for step, expected in zip(answer["metrics"], on_one_rank["metrics"], strict=True):
            assert step == pytest.approx(expected, rel=2e-4, abs=2e-6)
    moved = 0
    original = dict(read_weights(saved))
    for name, expected in on_one_rank["weights"].items():
        torch.testing.assert_close(answers[0]["weights"][name], expected, rtol=0, atol=2e-4, msg=name)
        moved += not torch.equal(expected, original[name])
    assert moved > len(original) / 2


def test_layouts_that_cut_too_finely_are_refused(ranks: Callable[[int], RankPool], saved: Path) -> None:
    wanted = (
        "linear_num_key_heads" if "linear_num_key_heads" in (saved / "config.json").read_text() else "num_key_value"
    )
    with pytest.raises(RankError, match=f"ConfigError: .*{wanted}"):
        ranks(4).run(f"{HERE}:run", directory=str(saved), layout={"tensor": 4, "sequence_parallel": True})
