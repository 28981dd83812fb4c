"""Micro-batches, ranks and settings of the trainer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_embedded.models.decoder import Decoder
from slime_embedded.trainer.microbatch import pack, through
from slime_embedded.trainer.parallel import DataParallel
from slime_embedded.trainer.settings import TrainerSettings

from slime_core.config import Args
from slime_core.errors import ConfigError, TrainError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights
from slime_core.sample import TrainBatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("every_token", [False, True])
def test_rows_point_at_the_predecessors_of_the_response(
    every_token: bool, make_batch: Callable[..., TrainBatch]
) -> None:
    """The last token of a sample predicts nothing."""
    batch = make_batch(6)
    micro = pack(batch, [4, 0, 3], 61, CPU, every_token=every_token)
    expected_ids, expected_rows, expected_targets = [], [], []
    for i in (4, 0, 3):
        start, tokens = len(expected_ids), batch.tokens[i]
        for t in range(len(tokens) - batch.response_lengths[i], len(tokens)):
            expected_rows.append(start + t - 1)
            expected_targets.append(tokens[t])
        expected_ids += tokens if every_token else tokens[:-1]
    assert micro.token_ids.tolist() == expected_ids
    assert micro.rows.tolist() == expected_rows
    assert micro.targets.tolist() == expected_targets


def test_a_sample_without_response_has_no_rows(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch(2)
    batch.response_lengths[1] = 0
    assert pack(batch, [1], 61, CPU).rows.shape == (0,)
    batch.tokens[1] = [7]
    micro = pack(batch, [1, 0], 61, CPU)
    assert micro.lengths == [1, len(batch.tokens[0]) - 1]
    assert micro.targets.tolist() == batch.tokens[0][-batch.response_lengths[0] :]


def test_bad_samples_are_named(make_batch: Callable[..., TrainBatch]) -> None:
    batch = make_batch(3)
    batch.sample_indices = [70, 71, 72]
    with pytest.raises(TrainError, match="without samples"):
        pack(batch, [], 61, CPU)
    with pytest.raises(TrainError, match="vocabulary of 5"):
        pack(batch, [0], 5, CPU)
    batch.response_lengths[1] = len(batch.tokens[1])
    with pytest.raises(TrainError, match=r"sample 71 .* at least one prompt token"):
        pack(batch, [0, 1], 61, CPU)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_prompt_is_computed_once_with_the_same_states_and_gradients(
    recompute: bool, model_dir: Path, make_batch: Callable[..., TrainBatch]
) -> None:
    """Prompts of 1, 2, 20 and 90 tokens, the third a beginning of the last, in no order; one sample has no response."""
    rng = random.Random(0)
    long = [rng.randrange(61) for _ in range(90)]
    prompts = [long, [5], long[:20], [7, 9], long, [5], long[:20], [7, 9], long[:20], long]
    batch = make_batch(len(prompts))
    batch.response_lengths = [0 if i == 3 else rng.randrange(1, 30) for i in range(len(prompts))]
    batch.tokens = [
        prompt + [rng.randrange(61) for _ in range(length)]
        for prompt, length in zip(prompts, batch.response_lengths, strict=True)
    ]
    config = load_model_config(model_dir)
    model = Decoder.from_weights(config, read_weights(model_dir), recompute=recompute)
    micro = pack(batch, range(len(prompts)), 61, CPU)
    computed: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda _, given, __: computed.append(len(given[0])))
    # Gradients of a few units, whose last bits are below the tolerance.
    weight = 0.2 * torch.randn(len(micro.rows), 32, generator=torch.Generator().manual_seed(0))
    found = []
    same = torch.nn.Identity()
    for hidden in (through(model, micro, same, every_row=True)[micro.rows], through(model, micro, same)):
        found.append((hidden, torch.autograd.grad((hidden * weight).sum(), list(model.parameters()))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    assert computed == [len(micro.token_ids), len(micro.token_ids) - (2 * 90 + 2 * 20 + 1)]


def test_one_process_needs_no_group() -> None:
    peers = DataParallel("cpu")
    x = torch.arange(3.0)
    total = peers.all_reduce(x)
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr()
    assert peers.broadcast(b"abc") == b"abc"
    peers.sum_in_buckets_(x)
    peers.barrier()
    peers.close()
    peers.close()
    assert not torch.distributed.is_initialized()


def test_several_processes_need_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR.*torchrun"):
        DataParallel("cpu")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE='two'"):
        DataParallel("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cuda"):
        DataParallel("cuda")
    assert DataParallel("auto").device.type == "cpu"


def settings(**flags: Any) -> TrainerSettings:
    return TrainerSettings.from_args(Args(**{"hf_checkpoint": "m", **flags}))


@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        ({}, None),
        ({"kl_coef": 0.0, "use_kl_loss": False, "ref_load": "r"}, None),
        ({"kl_coef": 0.1}, "m"),
        ({"use_kl_loss": True, "ref_load": "r"}, "r"),
    ],
)
def test_a_reference_is_loaded_only_when_kl_is_used(flags: dict[str, Any], reference: str | None) -> None:
    assert settings(**flags).ref_checkpoint == reference


def test_compute_dtype() -> None:
    cpu = torch.device("cpu")
    assert settings().compute_dtype(cpu) == torch.float32
    assert settings(bf16=True).compute_dtype(cpu) == torch.bfloat16
    assert settings(dtype="bfloat16").compute_dtype(cpu) == torch.bfloat16


@pytest.mark.parametrize(
    "flags",
    [
        {"recompute_granularity": "selective"},
        {"freeze_params_name_list": ["("]},
    ],
)
def test_what_cannot_be_honoured_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(flags))).replace("_", "-")):
        settings(**flags)


PARAMETERS = [
    ("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    ("model.layers.0.mlp.up_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight"),
    ("model.layers.0.post_attention_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight"),
    ("model.layers.1.mlp.up_proj.weight", "decoder.layers.1.mlp.linear_fc1.weight"),
]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"freeze_params_name_list": [r"layers\.0\."]}, {0, 3}),
        ({"only_train_params_name_list": ["norm", "embed"]}, {0, 2}),
        ({"only_train_params_name_list": ["mlp"]}, {1, 3}),  # which Megatron's name of a norm has, too
        ({"only_train_params_name_list": ["pre_mlp", "word_emb"]}, {0, 2}),
        ({"freeze_params_name_list": ["linear_fc1", r"^model\.embed"]}, {2}),
    ],
)
def test_which_parameters_train(flags: dict[str, Any], expected: set[int]) -> None:
    assert settings(**flags).trained(PARAMETERS) == ({PARAMETERS[index][0] for index in expected}, [])
