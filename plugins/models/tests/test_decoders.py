"""Decoders: vision-language models and mixtures of experts against transformers'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slime_data.images import ImagePrompts, load_processor
from slime_embedded.models.decoder import Decoder
from slime_models.qwen3_moe import model
from slime_testing_contracts.tiny import tiny_model
from slime_testing_contracts.tiny_vision import IMAGE_TOKENS, tiny_qwen2_vl, tiny_vision_model, write_image

from slime_core.config import Args
from slime_core.errors import ConfigError, TrainError
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights
from slime_core.multimodal import TrainInputs, image_token_of
from slime_core.plugins.resolve import resolve
from slime_core.protocols import MicroBatchOutput
from slime_core.rollout.batch import make_batch
from slime_core.sample import Sample, SampleStatus, TrainBatch
from tests.batches import train_batch

SETTINGS = {
    "num_threads": 1, "lr": 1e-2, "lr_decay_style": "constant", "lr_warmup_iters": 0, "num_rollout": 10,
    "global_batch_size": 3, "rollout_batch_size": 3, "n_samples_per_prompt": 1, "num_steps_per_rollout": 1,
    "train_iters": 10, "rollout_temperature": 1.0, "device": "cpu", "clip_grad": 0.0, "weight_decay": 0.0,
}  # fmt: skip
RESPONSES = (3, 5, 2)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def checkpoint() -> Path:
    return tiny_vision_model()


def trainer_of(checkpoint: Path, **changes: Any) -> Any:
    settings = Args(**{**SETTINGS, "hf_checkpoint": str(checkpoint), **changes})
    return resolve("trainers", "embedded", origin="test").obj(settings)


def batch_of(checkpoint: Path, *, images: bool = True) -> TrainBatch:
    """Three samples: two with an image, the last one of text."""
    image = _image_token(checkpoint)
    rng = np.random.default_rng(3)
    prompts = [[72, *[image] * IMAGE_TOKENS, 80], [*[image] * IMAGE_TOKENS, 90, 91, 92], [60, 61, 62]]
    if not images:
        prompts = [[72, 80], [90, 91, 92], [60, 61, 62]]
    tokens = [p + rng.integers(40, 120, n).tolist() for p, n in zip(prompts, RESPONSES)]
    pixels = [{"pixel_values": rng.standard_normal((1, 3, 16, 16)).astype(np.float32)} for _ in range(2)]
    return train_batch(
        [[1] * n for n in RESPONSES], tokens=tokens, group_indices=[0, 1, 2],
        multimodal_train_inputs=[*map(TrainInputs.of, pixels), None] if images else None,
    )  # fmt: skip


def _image_token(checkpoint: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(checkpoint).image_token_index)


def reference(checkpoint: Path | str) -> Any:
    from transformers import AutoModelForImageTextToText

    load: Any = AutoModelForImageTextToText.from_pretrained
    return load(checkpoint, dtype=torch.float32).eval()


def reference_log_probs(model: Any, batch: TrainBatch) -> list[torch.Tensor]:
    """From the model's own logits, one sample at a time."""
    found = []
    for tokens, length, inputs in zip(batch.tokens, batch.response_lengths, batch.multimodal_train_inputs or []):
        ids = torch.tensor([tokens])
        given = {name: torch.tensor(np.asarray(array)) for name, array in (inputs or {}).items()}
        logits = model(input_ids=ids, **given).logits[0].float()
        every = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(every[-length:])
    return found


def minus_mean(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -output.log_probs.sum() / sum(RESPONSES)
    return loss, {"loss": loss.detach()}


def test_log_probs_are_transformers(checkpoint: Path) -> None:
    batch, trainer, micro_batches = batch_of(checkpoint), trainer_of(checkpoint), [[2, 0], [1]]
    found = trainer.log_probs(batch, micro_batches)
    with torch.no_grad():
        expected = reference_log_probs(reference(checkpoint), batch)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    other = TrainInputs.of({"pixel_values": np.zeros((1, 3, 16, 16), np.float32)})
    batch.multimodal_train_inputs = [other, other, None]
    blank = trainer.log_probs(batch, micro_batches)
    assert (blank[0] - found[0]).abs().max() > 1e-3, "the pixels must matter"
    assert torch.equal(blank[2], found[2])
    trainer.close()


def test_a_step_moves_the_vision_tower_as_transformers_gradient_does(checkpoint: Path) -> None:
    batch, trainer = batch_of(checkpoint), trainer_of(checkpoint)
    model = reference(checkpoint)
    loss = -torch.cat(reference_log_probs(model, batch)).sum() / sum(RESPONSES)
    loss.backward()  # type: ignore[no-untyped-call]
    before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    result = trainer.train_step(batch, [[0, 1], [2]], minus_mean)
    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-4)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    assert set(gradients) <= set(ours)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-4)
    vision = [name for name in gradients if "vision_tower" in name]
    assert vision
    assert any(float(gradients[name].abs().max()) > 1e-4 for name in vision)
    after = dict(trainer.named_weights())
    assert any(not torch.equal(before[name], after[name]) for name in before if "vision_tower" in name)
    trainer.close()


def test_a_checkpoint_is_a_model_of_transformers_and_goes_on(checkpoint: Path, tmp_path: Path) -> None:
    batch, trainer = batch_of(checkpoint), trainer_of(checkpoint)
    trainer.train_step(batch, [[0, 1, 2]], minus_mean)
    trainer.save(tmp_path)
    again = trainer_of(checkpoint)
    again.load(tmp_path)
    found, expected = again.log_probs(batch, [[0, 1, 2]]), trainer.log_probs(batch, [[0, 1, 2]])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with torch.no_grad():
        loaded = reference_log_probs(reference(tmp_path), batch)
    torch.testing.assert_close(torch.cat(found), torch.cat(loaded), rtol=1e-4, atol=1e-4)
    assert (tmp_path / "processor_config.json").is_file()


VISION = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
}  # fmt: skip


@pytest.mark.parametrize("family", VISION)
def test_qwen_vl_with_positions_of_images(family: str, tmp_path: Path) -> None:
    """Multimodal rotary positions need the kind of every token; response tokens are text."""
    import transformers
    from transformers import Qwen2VLImageProcessorPil

    named = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]

    text = {
        "vocab_size": 130, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 2, "num_heads": 4, "patch_size": 14, **VISION[family]}
    build: Any = getattr(transformers, f"{named}Config")
    torch.manual_seed(1)
    config = build(
        text_config=text, vision_config=vision, image_token_id=125, video_token_id=126, vision_start_token_id=127,
        vision_end_token_id=128, tie_word_embeddings=False,
    )  # fmt: skip
    getattr(transformers, f"{named}ForConditionalGeneration")(config).save_pretrained(tmp_path)
    images: Any = Qwen2VLImageProcessorPil
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    found = images(min_pixels=28 * 28, max_pixels=84 * 84)(images=[pixels], return_tensors="pt")
    count = int(found["image_grid_thw"].prod()) // 4
    prompt = [5, 127, *[125] * count, 128, 6]
    kinds = [[int(token == 125) for token in prompt]]
    batch = batch_of(tiny_vision_model(), images=False).select([0])
    batch.tokens, batch.multimodal_train_inputs = [[*prompt, 7, 8, 9]], [{**found, "mm_token_type_ids": kinds}]
    trainer = trainer_of(tmp_path)
    (ours,) = trainer.log_probs(batch, [[0]])
    whole = torch.tensor([[*kinds[0], 0, 0, 0]])
    ids = torch.tensor(batch.tokens)
    with torch.no_grad():
        logits = reference(tmp_path)(input_ids=ids, mm_token_type_ids=whole, **found).logits[0]
    expected = torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[-3:, 0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_weights_have_the_names_of_published_files(tmp_path: Path) -> None:
    """Which engines know; transformers has others in memory."""
    from safetensors.torch import load_file

    trainer = trainer_of(tiny_qwen2_vl())
    stored = load_file(tiny_qwen2_vl() / "model.safetensors")
    assert {"visual.patch_embed.proj.weight", "model.embed_tokens.weight"} < stored.keys()
    assert {name: t.shape for name, t in trainer.named_weights()} == {name: t.shape for name, t in stored.items()}
    trainer.save(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == stored.keys()
    again = trainer_of(tiny_qwen2_vl())
    again.load(tmp_path)
    ours, theirs = dict(again.named_weights()), dict(trainer.named_weights())
    assert all(torch.equal(ours[name], theirs[name]) for name in stored)


@pytest.mark.parametrize("model", [tiny_vision_model, tiny_qwen2_vl])
def test_a_policy_that_samples_the_token_of_images_loses_the_sample_and_not_the_run(
    model: Callable[[], Path], tmp_path: Path
) -> None:
    processor, token = load_processor(model()), image_token_of(str(model()))
    prompts = ImagePrompts(processor, {"image": "images"}, tmp_path)
    messages, refs = prompts.messages("<image>?", {"images": [str(write_image(tmp_path / "a.png", 1))]})
    ids, inputs = prompts.encode(processor.tokenizer.apply_chat_template(messages, tokenize=False), refs)

    def sample(number: int, response: list[int]) -> Sample:
        made = Sample(
            index=number, group_index=0, tokens=list(ids), reward=1.0 * number, multimodal_inputs={"images": refs},
            multimodal_train_inputs=inputs,
        )  # fmt: skip
        made.append_response_tokens(None, response, [-1.0] * len(response), meta_info={"finish_reason": "stop"})
        return made

    assert token is not None
    trainer, group = trainer_of(model()), [sample(0, [70, 71]), sample(1, [70, token])]
    unchecked = make_batch(Args(reward_key=None), 0, [copy.deepcopy(group)], None)
    with pytest.raises(TrainError, match="the model refuses a sample"):
        trainer.log_probs(unchecked, [[0], [1]])
    batch = make_batch(Args(reward_key=None, hf_checkpoint=str(model())), 0, [group], None)
    assert [s.status for s in group] == [SampleStatus.COMPLETED, SampleStatus.FAILED]
    assert "the token of images" in group[1].metadata["failure"]["error"]
    assert torch.equal(trainer.log_probs(batch, [[0], [1]])[0], trainer.log_probs(unchecked.select([0]), [[0]])[0])
    trainer.close()


def test_what_the_trainer_cannot_do_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"llava model.*true-on-policy-mode"):
        trainer_of(checkpoint, true_on_policy_mode=True)
    trainer = trainer_of(tiny_model())
    batch = batch_of(checkpoint)
    batch.tokens = [[2, 3, 4, 5, 6, 7][: n + 1] for n in RESPONSES]
    with pytest.raises(TrainError, match="takes text only"):
        trainer.log_probs(batch, [[0, 1, 2]])


@pytest.mark.parametrize("missing", ["text_config", "vision_config"])
def test_a_missing_part_is_named(missing: str) -> None:
    hf: dict[str, Any] = {"model_type": "llava", "text_config": {}, "vision_config": {}}
    del hf[missing]
    with pytest.raises(ConfigError, match=missing):
        resolve("models", "llava", origin="test").obj(hf)


HF = {
    "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory that transformers wrote, and its model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    settings = {k: v for k, v in HF.items() if k != "model_type"}
    config = Qwen3MoeConfig(**settings, norm_topk_prob=True, initializer_range=0.2, mlp_only_layers=[1])
    reference = Qwen3MoeForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("qwen3-moe")
    reference.save_pretrained(directory)
    return directory, reference


def our_decoder(directory: Path) -> Decoder:
    return Decoder.from_weights(load_model_config(directory), read_weights(directory))


def test_logits_and_gradients_are_transformers(saved: tuple[Path, Any], tmp_path: Path) -> None:
    directory, reference = saved
    decoder = our_decoder(directory)
    ids = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(1))
    expected, found = reference(ids).logits[0], decoder(ids[0], [40])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    expected.backward(grad)
    found.backward(grad)
    # Their gradients under the names of the files: a model whose weights are those gradients, saved.
    from transformers import Qwen3MoeForCausalLM

    of_gradients = Qwen3MoeForCausalLM(reference.config)
    theirs = dict(reference.named_parameters())
    with torch.no_grad():
        for name, parameter in of_gradients.named_parameters():
            parameter.copy_(theirs[name].grad)
    reference.zero_grad()
    of_gradients.save_pretrained(tmp_path)
    gradients = dict(read_weights(tmp_path))
    for name, parameter in decoder.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # an expert nobody chose
        torch.testing.assert_close(grad, gradients[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, (0, 1, 2)),
        ({"decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": [0, 2]}, (1,)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [1]}, (2,)),
    ],
)
def test_which_layers_have_experts(change: dict[str, Any], layers: tuple[int, ...]) -> None:
    config = model({**HF, **change})
    assert config.moe is not None
    assert config.moe.layers == layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 of 6 experts; allowed: 1 to 6"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model({**HF, **change})
