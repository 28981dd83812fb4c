"""Models of transformers in trainer and engine, against plain float64 passes over each sample."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from slime_embedded.engine.core import EngineCore
from slime_embedded.engine.loading import load_core
from slime_embedded.engine.sequence import Sequence
from slime_embedded.fsdp.trainer import FsdpTrainer
from slime_embedded.hf.model import ALONE, PACKED, ROWS, TransformersModel
from slime_embedded.trainer.trainer import EmbeddedTrainer
from slime_estimators.grpo import GRPO
from slime_testing_contracts.families import FAMILIES, write_family

from slime_core import RewardInputs
from slime_core.config import Args
from slime_core.errors import CheckpointError, ConfigError, PluginNotFoundError, WeightSyncError
from slime_core.learning.learner import Learner
from slime_core.learning.loss import PolicyLoss
from slime_core.models.hf_io import read_weights
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch
from tests.batches import train_batch
from tests.toy_trainer import make_args

torch.set_num_threads(1)
QUICK = ("gemma2", "gpt_oss", "lfm2", "qwen3_moe")
"""A soft cap and eager attention; packing mixes samples, as in gpt_oss and lfm2, which has no keys; stacked experts."""
LENGTHS = ((9, 4), (30, 11), (5, 3), (14, 9), (70, 5))
"""(tokens, response) of each sample."""
TABLE = Path(__file__).parents[4] / "docs" / "trainers" / "families.md"
BOUND = 2e-5


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a family's model, written once."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = write_family(tmp_path_factory.mktemp("families") / name, name)
        return made[name]

    return directory


def args_of(directory: Path, **more: Any) -> Args:
    return Args(
        hf_checkpoint=str(directory), device="cpu", lr=1e-2, lr_decay_style="constant", clip_grad=0.0,
        rollout_temperature=0.8, **more,
    )  # fmt: skip


def batch() -> TrainBatch:
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(3, 14, (length,), generator=generator).tolist() for length, _ in LENGTHS]
    return train_batch([[1] * response for _, response in LENGTHS], tokens=tokens)


def loss_of(log_probs: torch.Tensor) -> torch.Tensor:
    return (log_probs * torch.linspace(-1, 1, len(log_probs), dtype=log_probs.dtype)).sum() / len(log_probs)


def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    parts = torch.split(output.log_probs, [LENGTHS[i][1] for i in output.positions])
    loss = torch.stack([loss_of(part) for part in parts]).sum()
    return loss, {"loss": loss.detach()}


def reference(directory: Path) -> Any:
    """Return the model in float64, without dropout."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager", local_files_only=True
    )
    return model.eval()


def gaps(directory: Path, **more: Any) -> tuple[EmbeddedTrainer, float, float]:
    """Take a step; return the largest differences of log-probs and, relative to the largest, of gradients."""
    trainer, model = EmbeddedTrainer(args_of(directory, model_impl="transformers", **more)), reference(directory)
    found = trainer.log_probs(batch(), [[4, 0, 2], [1, 3]])
    trainer.train_step(batch(), [[0, 1, 2], [3, 4]], loss_fn)
    worst = 0.0
    for tokens, length, ours in zip(batch().tokens, batch().response_lengths, found):
        ids = torch.tensor(tokens)
        logits = model(input_ids=ids[None], use_cache=False).logits[0] / 0.8
        scores = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[-length:, 0]
        loss_of(scores).backward()
        worst = max(worst, float((scores.detach() - ours).abs().max()))
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    mine = {name: parameter.grad for name, parameter in trainer.model.named_parameters() if parameter.grad is not None}
    assert grads.keys() <= mine.keys()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    return trainer, worst, max(float((grads[name] - mine[name]).abs().max()) for name in grads) / largest


@pytest.mark.parametrize("name", QUICK)
def test_a_step_is_the_float64_references(name: str, family: Callable[[str], Path]) -> None:
    trainer, log_probs, gradients = gaps(family(name))
    assert isinstance(trainer.model, TransformersModel)
    assert trainer.model.exact == ({ALONE, ROWS} if name in ("gpt_oss", "lfm2") else {ALONE, ROWS, PACKED})
    assert max(log_probs, gradients) < BOUND
    assert trainer.config.num_layers == trainer.decoder_shape(family(name)).num_layers == 4


def test_recomputed_layers_change_no_bit(family: Callable[[str], Path]) -> None:
    kept, again = (
        EmbeddedTrainer(args_of(family("gemma2"), recompute_granularity=granularity)) for granularity in (None, "full")
    )
    for trainer in (kept, again):
        trainer.train_step(batch(), [[0, 1, 2], [3, 4]], loss_fn)
    assert torch.equal(kept.optimizer.values, again.optimizer.values)


@pytest.mark.parametrize("layout", [PACKED, ROWS, ALONE])
def test_every_layout_gives_the_states_of_each_sample_alone(layout: str, family: Callable[[str], Path]) -> None:
    trainer = EmbeddedTrainer(args_of(family("gemma2")))
    model = trainer.model
    assert isinstance(model, TransformersModel)
    ids, lengths = torch.randint(3, 14, (100,), generator=torch.Generator().manual_seed(0)), [20, 1, 70, 9]
    rows = torch.tensor([3, 98, 25]).numpy()
    with torch.no_grad():
        expected = model.laid_out(ALONE, ids, lengths)
        torch.testing.assert_close(model.laid_out(layout, ids, lengths), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.laid_out(layout, ids, lengths, rows), expected[rows], rtol=1e-4, atol=1e-5)


def test_a_resumed_run_continues_bit_for_bit_and_files_are_of_transformers(
    family: Callable[[str], Path], tmp_path: Path
) -> None:
    """Experts are stacked in the model and apart in the files."""
    directory = family("qwen3_moe")
    trainer = EmbeddedTrainer(args_of(directory, model_impl="transformers", save_dtype="bfloat16"))
    trainer.train_step(batch(), [[0, 1, 2, 3, 4]], loss_fn)
    trainer.save(tmp_path)
    saved = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    expected = trainer.train_step(batch(), [[0, 1, 2, 3, 4]], loss_fn).metrics
    resumed = EmbeddedTrainer(args_of(directory, model_impl="transformers", save_dtype="bfloat16"))
    resumed.load(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.named_weights())
    assert resumed.train_step(batch(), [[0, 1, 2, 3, 4]], loss_fn).metrics == expected
    assert torch.equal(resumed.optimizer.values, trainer.optimizer.values)
    assert saved.keys() == dict(read_weights(directory)).keys() == dict(read_weights(tmp_path)).keys()
    other = EmbeddedTrainer(args_of(directory, model_impl="slime", finetune=True))
    other.load(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in other.named_weights())
    read = reference(tmp_path).get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    torch.testing.assert_close(
        read[2, :16].float(), saved["model.layers.1.mlp.experts.2.gate_proj.weight"].bfloat16().float()
    )


def test_checkpoints_keep_tensors_that_the_model_does_not_hold(family: Callable[[str], Path], tmp_path: Path) -> None:
    directory = family("qwen3_5")
    trainer = EmbeddedTrainer(args_of(directory, save_dtype="bfloat16"))
    trainer.train_step(batch(), [[0, 1, 2, 3, 4]], loss_fn)
    trainer.save(tmp_path)
    saved, before = dict(read_weights(tmp_path)), dict(read_weights(directory))
    assert saved.keys() == before.keys()
    same = {name for name in saved if torch.equal(saved[name], before[name].bfloat16())}
    assert {name for name in saved if ".visual." in name} <= same < saved.keys()
    resumed = EmbeddedTrainer(args_of(directory))
    resumed.load(tmp_path)
    assert torch.equal(resumed.optimizer.values, trainer.optimizer.values)


@pytest.mark.parametrize("kind", [EmbeddedTrainer, FsdpTrainer])
def test_biases_of_routers_are_kept_and_served(
    kind: type[EmbeddedTrainer], family: Callable[[str], Path], tmp_path: Path
) -> None:
    """No gradient changes them, so transformers has them as buffers; another trainer may send other ones."""
    directory, saved = tmp_path / "model", tmp_path / "saved"
    shutil.copytree(family("deepseek_v3"), directory)
    weights = dict(read_weights(directory))
    biases = {name: torch.randn_like(tensor) for name, tensor in weights.items() if name.endswith("correction_bias")}
    weights |= biases
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    trainer, core = kind(args_of(directory)), load_core(args_of(family("deepseek_v3")))
    try:
        sent = {name: tensor.clone() for name, tensor in trainer.named_weights()}
        trainer.save(saved)
    finally:
        trainer.close()
    assert biases
    for found in (sent, dict(read_weights(saved))):
        assert all(torch.equal(found[name], tensor) for name, tensor in biases.items())
    core.update_weights(sent.items(), 1, "a test")
    assert core.weight_checksums() == load_core(args_of(directory)).weight_checksums()


def test_parts_for_images_are_kept_as_they_are(family: Callable[[str], Path]) -> None:
    trainer = EmbeddedTrainer(args_of(family("gemma3"), weight_decay=0.1))
    trainer.train_step(batch(), [[0, 1, 2, 3, 4]], loss_fn)
    before = dict(read_weights(family("gemma3")))
    for name, tensor in trainer.named_weights():
        assert torch.equal(tensor, before[name]) == ("vision_tower" in name or "multi_modal" in name), name


def test_adapters_are_trained_beside_a_frozen_reference(family: Callable[[str], Path], tmp_path: Path) -> None:
    more = {"lora_rank": 2, "kl_coef": 0.1}
    trainer = EmbeddedTrainer(args_of(family("gemma2"), **more))
    before = trainer.log_probs(batch(), [[0, 1, 2, 3, 4]])
    trainer.train_step(batch(), [[0, 1, 2, 3, 4]], loss_fn)
    for old, frozen in zip(before, trainer.log_probs(batch(), [[0, 1, 2, 3, 4]], role="ref")):
        torch.testing.assert_close(old, frozen, rtol=1e-5, atol=1e-5)
    trainer.save(tmp_path)
    resumed = EmbeddedTrainer(args_of(family("gemma2"), **more))
    resumed.load(tmp_path)
    assert torch.equal(resumed.optimizer.values, trainer.optimizer.values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sharded_model_takes_the_same_step(dtype: str, family: Callable[[str], Path]) -> None:
    more = {"dtype": dtype, "kl_coef": 0.1}
    whole, shards = (each(args_of(family("gemma2"), **more)) for each in (EmbeddedTrainer, FsdpTrainer))
    frozen = [trainer.log_probs(batch(), [[0, 1, 2, 3, 4]], role="ref") for trainer in (whole, shards)]
    found = [trainer.train_step(batch(), [[0, 1, 2], [3, 4]], loss_fn).metrics for trainer in (whole, shards)]
    near = 1e-5 if dtype == "float32" else 2e-2
    torch.testing.assert_close(*frozen, rtol=near, atol=near)
    assert found[1] == pytest.approx(found[0], rel=near, abs=near)
    for trainer in (whole, shards):
        trainer.close()


# -- engine ----------------------------------------------------------------------------------------


def answers(core: EngineCore, *, alone: bool = False) -> Iterator[Sequence]:
    """Sample 11 requests, some of them admitted late, retracted, or of one prompt; `alone`: one after the other."""
    generator, made = torch.Generator().manual_seed(3), list[Sequence]()

    def add(length: int, count: int, **keywords: Any) -> None:
        ids = torch.randint(3, 14, (length,), generator=generator).tolist()
        for more in range(count):
            params = {
                "max_new_tokens": 6 + 3 * more,
                "temperature": 0.9,
                "ignore_eos": True,
                "sampling_seed": len(made),
            }
            made.append(core.add_request(ids, params, f"r{len(made)}", **keywords))
            finish(core if alone else None)

    def finish(core: EngineCore | None) -> None:
        while core is not None and core.has_work:
            core.step()

    add(7, 3)
    add(11, 2, logprob_start=0)
    add(70, 1)
    for _ in range(0 if alone else 4):
        core.step()
    add(5, 1)
    add(9, 4)
    for _ in range(0 if alone else 3):
        core.step()
    if not alone:
        core.pause("retract")
        core.resume()
    finish(core)
    return iter(made)


def worst_log_prob(sequences: Iterable[Sequence], model: Any) -> float:
    """Largest difference between log-probs of `answers` and those of a plain pass over each answer."""
    worst = 0.0
    for sequence in sequences:
        assert sequence.num_output == sequence.limit, sequence.finish
        ids, start = torch.tensor(sequence.tokens), len(sequence.prompt_ids)
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].double() / 0.9, -1)
        expected = scores[:-1].gather(1, ids[1:, None])[:, 0]
        found = torch.tensor(sequence.prompt_log_probs + sequence.log_probs, dtype=torch.float64)
        worst = max(worst, float((expected[-len(found) :] - found).abs().max()))
        assert sequence.logprob_start is None or len(sequence.prompt_log_probs) == start - 1
    return worst


@pytest.mark.parametrize("name", QUICK)
def test_the_engine_samples_as_alone_with_the_log_probs_of_a_plain_pass(
    name: str, family: Callable[[str], Path]
) -> None:
    core = load_core(args_of(family(name), model_impl="transformers"))
    together = list(answers(core))
    assert worst_log_prob(together, reference(family(name))) < BOUND
    assert [s.tokens for s in together] == [s.tokens for s in answers(core, alone=True)]
    assert core.memory.nbytes()["kv_cache"] == 0, "a cache outlives its last sequence"


def test_new_weights_serve_at_once_and_wrong_ones_never(family: Callable[[str], Path]) -> None:
    directory = family("qwen3_moe")
    core = load_core(args_of(directory, model_impl="transformers"))
    own = load_core(args_of(directory, model_impl="slime"))
    weights = {name: tensor * 1.01 for name, tensor in read_weights(directory)}
    before = core.weight_checksums()
    with pytest.raises(WeightSyncError, match=r"missing .*embed_tokens"):
        core.update_weights([pair for pair in weights.items() if "embed_tokens" not in pair[0]], 1, "a test")
    assert core.weight_checksums() == before == own.weight_checksums()
    request = core.add_request([5, 6, 7], {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}, "across")
    core.step()
    for each in (core, own):
        each.update_weights(weights.items(), 7, "a test")
    while core.has_work:
        core.step()
    assert request.token_versions() == [0] + [7] * 5
    assert core.weight_checksums() == own.weight_checksums() != before
    first, second = (worst_log_prob(answers(each), core.runner.model.inner.model) for each in (core, own))  # type: ignore[union-attr]
    assert max(first, second) < BOUND
    core.release_memory()
    assert sum(core.memory.nbytes().values()) == 0


# -- refusals and choice -----------------------------------------------------------------------------


def test_transformers_is_chosen_for_families_without_a_decoder_of_slime(family: Callable[[str], Path]) -> None:
    assert isinstance(EmbeddedTrainer(args_of(family("gemma2"))).model, TransformersModel)
    assert not isinstance(EmbeddedTrainer(args_of(family("qwen3_moe"))).model, TransformersModel)
    with pytest.raises(PluginNotFoundError, match="gemma2"):
        EmbeddedTrainer(args_of(family("gemma2"), model_impl="slime"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    changes: dict[str, Any], named: str, family: Callable[[str], Path], tmp_path: Path
) -> None:
    from slime_core.models.config import read_hf_config
    from slime_core.models.hf_io import write_config

    write_config(tmp_path, read_hf_config(family("gemma2")) | changes)
    with pytest.raises(ConfigError, match=named):
        EmbeddedTrainer(args_of(tmp_path, model_impl="transformers"))


def test_missing_tensors_are_named(family: Callable[[str], Path], tmp_path: Path) -> None:
    from slime_core.models.hf_io import copy_assets, write_weights

    copy_assets(family("gemma2"), tmp_path)
    write_weights(tmp_path, [pair for pair in read_weights(family("gemma2")) if "layers.2.mlp.up" not in pair[0]])
    with pytest.raises(CheckpointError, match=r"missing model.layers.2.mlp.up_proj.weight"):
        EmbeddedTrainer(args_of(tmp_path))


@pytest.mark.parametrize(
    ("flags", "named"),
    [({"true_on_policy_mode": True}, "--true-on-policy-mode"), ({"use_routing_replay": True}, "--use-routing-replay")],
)
def test_features_of_slimes_decoders_are_refused(
    flags: dict[str, Any], named: str, family: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=named):
        EmbeddedTrainer(args_of(family("gemma2"), **flags))
    if "true_on_policy_mode" in flags:
        with pytest.raises(ConfigError, match=named):
            load_core(args_of(family("gemma2"), **flags))


# -- table -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_says_how_a_family_trains_and_generates(name: str, family: Callable[[str], Path]) -> None:
    """Compare with the table; `SLIME_FAMILIES_TABLE=FILE` writes a line for each family to a file instead."""
    trainer, log_probs, gradients = gaps(family(name))
    assert isinstance(trainer.model, TransformersModel)
    core = load_core(args_of(family(name), model_impl="transformers"))
    sampled = worst_log_prob(answers(core), reference(family(name)))
    layout = next(layout for layout in (PACKED, ROWS, ALONE) if layout in trainer.model.exact)
    found = (layout, "mixed" if core.runner.pads else "equal")  # type: ignore[union-attr]
    worst = max(log_probs, gradients, sampled)
    if file := os.environ.get("SLIME_FAMILIES_TABLE"):
        with open(file, "a", encoding="utf-8") as table:
            table.write(f"{name} {' '.join(found)} {log_probs:.1e} {gradients:.1e} {sampled:.1e}\n")
    else:
        rows = [
            row.strip("| ").split(" | ")
            for row in TABLE.read_text(encoding="utf-8").splitlines()
            if row.startswith("|") and f"`{name}`" in row
        ]
        assert [tuple(row[:2]) for row in rows] == [found]
        assert worst < float(rows[0][3])


torch.set_num_threads(1)
SAMPLES = ((9, 4), (30, 11), (5, 3), (14, 9), (70, 5), (8, 7), (12, 2), (21, 8))
"""(tokens, response) of each sample; four samples are a group and an optimizer step."""
REWARDS = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.2]
KL, ENTROPY, CLIP, LR, EPS, DECAY, NORM, TEMPERATURE = 0.1, 0.02, 0.02, 5e-3, 1e-3, 0.01, 0.5, 0.8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("grpo") / "qwen3", "qwen3")


def tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 14, (length,), generator=generator).tolist() for length, _ in SAMPLES]


def model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    found: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, local_files_only=True)
    return found.eval()


def pass_of(model: Any, ids: list[int], response: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs and entropies of the response tokens of one sample."""
    row = torch.tensor(ids)
    scores = torch.log_softmax(model(input_ids=row[None], use_cache=False).logits[0] / TEMPERATURE, -1)[:-1]
    entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(1, row[1:, None])[-response:, 0], entropy[-response:]


def by_hand(directory: Path) -> tuple[Any, list[float]]:
    """Return the float64 model after two steps, and their gradient norms."""
    policy, reference = model(directory), model(directory)
    parts = [[p for p in policy.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (DECAY, 0.0))]
    optimizer, rows, norms = torch.optim.AdamW(groups, lr=LR, eps=EPS), tokens(), []
    with torch.no_grad():
        start = [pass_of(reference, ids, response)[0] for ids, (_, response) in zip(rows, SAMPLES)]
    for group in (range(4), range(4, 8)):
        rewards = torch.tensor([REWARDS[i] for i in group], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        optimizer.zero_grad()
        for i, advantage in zip(group, advantages):
            log_probs, entropy = pass_of(policy, rows[i], SAMPLES[i][1])
            ratio, apart = (log_probs - start[i]).exp(), start[i] - log_probs
            surrogate = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
            loss = surrogate + KL * (apart.exp() - apart - 1) - ENTROPY * entropy
            (loss.mean() / 4).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), NORM)))
        optimizer.step()
    return policy, norms


@pytest.mark.parametrize("implementation", ["slime", "transformers"])
@pytest.mark.parametrize("kind", [EmbeddedTrainer, FsdpTrainer])
def test_the_steps_of_a_rollout_are_those_written_by_hand(
    kind: type[EmbeddedTrainer], implementation: str, directory: Path
) -> None:
    args = make_args(
        hf_checkpoint=str(directory), device="cpu", model_impl=implementation, lr=LR, lr_decay_style="constant",
        clip_grad=NORM, adam_eps=EPS, weight_decay=DECAY, rollout_temperature=TEMPERATURE, global_batch_size=4,
        micro_batch_size=2, use_kl_loss=True, kl_loss_coef=KL, kl_loss_type="low_var_kl", entropy_coef=ENTROPY,
        eps_clip=CLIP, eps_clip_high=CLIP,
    )  # fmt: skip
    grpo, responses = GRPO(args), [response for _, response in SAMPLES]
    groups = [0] * 4 + [1] * 4
    shaped = grpo.shape_rewards(args, RewardInputs(REWARDS, groups, list(range(8)), responses, [False] * 8))
    batch = train_batch([[1] * n for n in responses], tokens=tokens(), rewards=shaped, group_indices=groups)
    trainer = kind(args)
    try:
        assert isinstance(trainer.model, TransformersModel) == (implementation == "transformers")
        metrics = Learner(args, trainer, grpo, PolicyLoss(args, grpo)).train(0, batch)
        policy, norms = by_hand(directory)
        assert metrics["train/grad_norm"] == pytest.approx(sum(norms) / 2, rel=BOUND)
        found, expected, before = dict(trainer.named_weights()), policy.state_dict(), model(directory).state_dict()
        apart = max(float((found[name] - expected[name]).abs().max()) for name in found)
        moved = max(float((before[name] - expected[name]).abs().max()) for name in found)
        assert apart < BOUND < moved / 100
        again = trainer.log_probs(batch, [[0, 1, 2], [3, 4, 5, 6, 7]])
        for i, (ids, response) in enumerate(zip(tokens(), responses)):
            with torch.no_grad():
                assert float((pass_of(policy, ids, response)[0] - again[i]).abs().max()) < BOUND
    finally:
        trainer.close()
