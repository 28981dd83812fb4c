"""Qwen3-Next and MiniMax-M2 over several ranks against transformers: logits, gradients, files.

Both have modules of their own in the place of Megatron's: linear attention whose heads are split, norms over all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_trainer_megatron.families import load_megatron_model

from slime_core.config import Args
from slime_core.errors import ConfigError
from slime_core.models.hf_io import read_weights
from tests.backends.megatron import trainer_jobs as jobs
from tests.backends.megatron.ranks import RankPool

pytestmark = pytest.mark.backends

HERE = "tests.backends.megatron.test_families_qwen3_next_minimax_m2"
LENGTHS = (70, 1, 131, 5, 65)
VOCABULARY = 96
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.05,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "mlp_only_layers": [1],
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
}
FAMILIES["qwen3_next, ranks share key heads"] = {**FAMILIES["qwen3_next"], "num_key_value_heads": 1}
"""Model type, and in words what is special -> entries of `config.json`."""


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def weighing() -> torch.Tensor:
    """[tokens, vocabulary] gradient of the loss by the logits."""
    return torch.randn(sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(5))


def trained(directory: str, layout: dict[str, Any]) -> dict[str, Any]:
    """One forward and backward pass of this rank's sequences, packed, and what is exported."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.packed_seq_params import PackedSeqParams
    from slime_trainer_megatron.arguments.config import ddp_config, transformer_config
    from slime_trainer_megatron.cpu_mode import on_device
    from slime_trainer_megatron.layout import Layout
    from slime_trainer_megatron.model.build import build_model
    from slime_trainer_megatron.process_groups import ProcessGroups
    from slime_trainer_megatron.weights.weights_in import load_hf
    from slime_trainer_megatron.weights.weights_out import hf_weights

    # The distributed optimizer would leave every data-parallel rank with its own part of the summed gradients.
    args = Args(hf_checkpoint=directory, use_distributed_optimizer=False)
    place, cpu = Layout(**layout), torch.device("cpu")
    groups = ProcessGroups(place, "cpu")
    model = load_megatron_model(directory)
    config = transformer_config(args, model.architecture, place, device=cpu)
    chunks = build_model(args, model, config, place)
    load_hf(chunks, model, directory)
    exported = dict(hf_weights(chunks, model))
    if groups.pipeline_size > 1:
        return {"exported": exported}
    mine = list(range(len(LENGTHS)))[groups.data_rank :: groups.data_size]
    tokens, grads = sequences(), weighing().split(LENGTHS)
    with on_device(cpu):
        ddp = DistributedDataParallel(config, ddp_config(args, device=cpu), chunks[0])
        ddp.zero_grad_buffer()
        ids = torch.cat([tokens[i] for i in mine])
        positions = torch.cat([torch.arange(LENGTHS[i]) for i in mine])
        starts = torch.tensor([0, *(LENGTHS[i] for i in mine)]).cumsum(0).to(torch.int32)
        longest = max(LENGTHS[i] for i in mine)
        packed = PackedSeqParams("thd", starts, starts, starts, starts, longest, longest)
        logits = ddp(ids[None], positions[None], None, packed_seq_params=packed)[0]
        logits.backward(torch.cat([grads[i] for i in mine]).chunk(groups.tensor_size, 1)[groups.tensor_rank])
        finalize_model_grads([ddp], None)
    gradients = dict(hf_weights([ddp], model, what=lambda parameter: getattr(parameter, "main_grad", None)))
    return {
        "samples": mine,
        "tensor_rank": groups.tensor_rank,
        "logits": logits.detach(),
        "gradients": {name: tensor.clone() for name, tensor in gradients.items()},
        "exported": exported,
    }


def through_checkpoint(directory: str, layout: dict[str, Any], checkpoint: str, write: bool) -> dict[str, torch.Tensor]:
    """Write a checkpoint of the files' weights, or read one into random ones; what is exported."""
    from slime_trainer_megatron.arguments.config import transformer_config
    from slime_trainer_megatron.checkpoints.dist_checkpoint import load_parts, metadata, save_parts
    from slime_trainer_megatron.cpu_mode import on_device
    from slime_trainer_megatron.layout import Layout
    from slime_trainer_megatron.model.build import build_model
    from slime_trainer_megatron.process_groups import ProcessGroups
    from slime_trainer_megatron.weights.weights_in import load_hf
    from slime_trainer_megatron.weights.weights_out import hf_weights

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


def refused(directory: str, layout: dict[str, Any]) -> str:
    try:
        trained(directory, layout)
    except ConfigError as error:
        return str(error)
    raise AssertionError("not refused")


def reference_config(family: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family.partition(",")[0], **{**TINY, **FAMILIES[family]})


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A directory that transformers wrote, its logits and gradients of every sequence on its own."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(reference_config(request.param), **options).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and "inv_freq" not in name:  # norms and biases start at constants
                tensor.add_(torch.randn(tensor.shape) * 0.3)
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    logits = torch.cat([model(ids[None]).logits[0] for ids in sequences()])
    logits.backward(weighing())
    of_gradients = AutoModelForCausalLM.from_config(model.config)
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in of_gradients.named_parameters():
            parameter.copy_(theirs[name].grad)
    of_gradients.save_pretrained(directory / "gradients")
    return {
        "family": request.param,
        "directory": str(directory),
        "logits": logits.detach(),
        "gradients": dict(read_weights(directory / "gradients")),
    }


def whole_logits(answers: list[dict[str, Any]]) -> torch.Tensor:
    """[tokens, vocabulary] of all sequences in order, from the parts of all ranks."""
    of_sample: dict[int, dict[int, torch.Tensor]] = {}
    for answer in answers:
        parts = answer["logits"].split([LENGTHS[i] for i in answer["samples"]])
        for sample, part in zip(answer["samples"], parts, strict=True):
            of_sample.setdefault(sample, {})[answer["tensor_rank"]] = part
    return torch.cat([torch.cat([parts[i] for i in sorted(parts)], -1) for _, parts in sorted(of_sample.items())])


LAYOUTS = {
    "one": {},
    "tensor": {"tensor": 2, "sequence_parallel": True},
    "expert": {"expert": 2},
    "tensor_and_expert": {"tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 1},
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_logits_gradients_and_weights_are_transformers(
    ranks: Callable[[int], RankPool], reference: dict[str, Any], layout: str
) -> None:
    world = 1 if layout == "one" else 2
    answers = ranks(world).run(f"{HERE}:trained", directory=reference["directory"], layout=LAYOUTS[layout])
    logits, expected = whole_logits(answers), reference["logits"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)
    gradients = answers[0]["gradients"]
    trained_names = {name for name in reference["gradients"] if "e_score_correction_bias" not in name}
    assert gradients.keys() == trained_names
    for name, found in gradients.items():
        wanted = reference["gradients"][name]
        # The floor is for decays, whose gradients nearly cancel over tokens.
        torch.testing.assert_close(found, wanted, rtol=0, atol=max(1e-5 * float(wanted.abs().max()), 1e-4), msg=name)
    came_back(answers, reference)


def came_back(answers: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    """Check that what rank 0 exports is bitwise what the files have."""
    original = dict(read_weights(Path(reference["directory"])))
    exported = answers[0]["exported"]
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)


def test_weights_come_back_over_a_pipeline(ranks: Callable[[int], RankPool], reference: dict[str, Any]) -> None:
    came_back(ranks(2).run(f"{HERE}:trained", directory=reference["directory"], layout={"pipeline": 2}), reference)


def test_a_checkpoint_of_one_layout_is_read_by_another(
    ranks: Callable[[int], RankPool], reference: dict[str, Any], tmp_path: Path
) -> None:
    job = {"directory": reference["directory"], "checkpoint": str(tmp_path)}
    ranks(2).run(f"{HERE}:through_checkpoint", **job, layout=LAYOUTS["tensor"], write=True)
    original = dict(read_weights(Path(reference["directory"])))
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
def on_one_rank(ranks: Callable[[int], RankPool], reference: dict[str, Any]) -> dict[str, Any]:
    """Three steps of the trainer in one process."""
    (found,) = ranks(1).run(f"{jobs.__name__}:megatron", model=reference["directory"])
    return found


@pytest.mark.parametrize("layout", sorted(TRAINED))
def test_three_steps_are_those_of_one_rank(
    ranks: Callable[[int], RankPool], reference: dict[str, Any], on_one_rank: dict[str, Any], layout: str
) -> None:
    answers = ranks(2).run(f"{jobs.__name__}:megatron", model=reference["directory"], **TRAINED[layout])
    for answer in answers:
        part, _ = jobs.shares(2 if layout == "data" else 1)[answer["rank"]]
        for name in ("log_probs", "entropy", "after"):
            for found, position in zip(answer[name], part, strict=True):
                torch.testing.assert_close(found, on_one_rank[name][position], rtol=0, atol=2e-4)
        for step, expected in zip(answer["metrics"], on_one_rank["metrics"], strict=True):
            assert step == pytest.approx(expected, rel=2e-4, abs=2e-6)
    moved = 0
    original = dict(read_weights(Path(reference["directory"])))
    for name, expected in on_one_rank["weights"].items():
        torch.testing.assert_close(answers[0]["weights"][name], expected, rtol=0, atol=2e-4, msg=name)
        moved += not torch.equal(expected, original[name])
    assert moved > len(original) / 2


def test_layouts_that_cut_too_finely_are_refused(ranks: Callable[[int], RankPool], reference: dict[str, Any]) -> None:
    layout = {"tensor": 4, "sequence_parallel": True}
    said = ranks(4).run(f"{HERE}:refused", directory=reference["directory"], layout=layout)
    wanted = "num_key_value_heads 2" if reference["family"] == "minimax_m2" else "linear_num_key_heads"
    assert all(wanted in text for text in said)
