"""The trainer against a plain transformers model trained one sample at a time; its micro-batches and settings."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from slime_embedded.models.decoder import Decoder
from slime_embedded.models.logprobs import response_log_probs
from slime_embedded.trainer.frozen import tensors
from slime_embedded.trainer.microbatch import pack, through
from slime_embedded.trainer.parallel import DataParallel
from slime_embedded.trainer.settings import TrainerSettings
from slime_embedded.trainer.trainer import EmbeddedTrainer
from slime_estimators.distillation.loss import Distillation
from slime_estimators.grpo import GRPO
from transformers import AutoModelForCausalLM

from slime_core.config import Args, load_settings
from slime_core.errors import ConfigError, TrainError
from slime_core.learning.tensors import Denominators, TrainTensors
from slime_core.models.config import load_model_config
from slime_core.models.hf_io import read_weights
from slime_core.protocols import LossFn, MicroBatchOutput
from slime_core.sample import TrainBatch
from tests.chat_tokenizers import save

MakeArgs = Callable[..., SimpleNamespace]
MakeBatch = Callable[..., TrainBatch]


def weighted_loss(batch: TrainBatch, entropy_coef: float = 0.0) -> LossFn:
    """Policy gradient with the rewards as advantages, normalised over the whole batch."""
    total = sum(batch.response_lengths)

    def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        lengths = [batch.response_lengths[i] for i in output.positions]
        rewards = torch.tensor([batch.rewards[i] for i in output.positions])
        loss = -(output.log_probs * rewards.repeat_interleave(torch.tensor(lengths))).sum() / total
        if output.entropy is not None:
            loss = loss - entropy_coef * output.entropy.sum() / total
        return loss, {"loss": loss, "tokens": torch.tensor(float(sum(lengths)))}

    return loss_fn


def weights(trainer: EmbeddedTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def reference_log_probs(model: Any, batch: TrainBatch, temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per sample: response log-probs and entropies from the full logits."""
    results = []
    for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
        ids = torch.tensor(tokens)
        logits = model(ids[None]).logits[0, -response - 1 : -1] / temperature
        log_p = torch.log_softmax(logits, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        results.append((log_p.gather(-1, ids[-response:, None]).squeeze(-1), entropy))
    return results


def reference_loss(model: Any, batch: TrainBatch, temperature: float, entropy_coef: float) -> torch.Tensor:
    total = torch.zeros(())
    for (log_probs, entropy), reward in zip(reference_log_probs(model, batch, temperature), batch.rewards, strict=True):
        total = total - (log_probs * reward).sum() - entropy_coef * entropy.sum()
    return total / sum(batch.response_lengths)


def test_three_steps_equal_plain_transformers_training(
    make_args: MakeArgs, make_batch: MakeBatch, model_dir: Path
) -> None:
    flags = {"lr": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 0.1, "rollout_temperature": 0.7}
    trainer = EmbeddedTrainer(make_args(**flags))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    parameters = list(model.parameters())
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    for step in range(3):
        batch = make_batch(6, seed=step)
        micro_batches = [[0, 3], [5, 1, 4], [2]]
        result = trainer.train_step(batch, micro_batches, weighted_loss(batch, 0.01), with_entropy=True).metrics
        plain.zero_grad()
        loss = reference_loss(model, batch, 0.7, 0.01)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        gradients = dict(model.named_parameters())
        for name, parameter in trainer.model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6, msg=name)
        plain.step()
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert result["tokens"] == sum(batch.response_lengths)
        assert result["lr"] == 1e-3
    expected = dict(model.named_parameters())
    for name, tensor in trainer.named_weights():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_bfloat16_is_close_and_parameters_stay_float32(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    batch = make_batch(8)
    exact, rounded = EmbeddedTrainer(make_args()), EmbeddedTrainer(make_args(dtype="bfloat16"))
    found = torch.cat(rounded.log_probs(batch, [list(range(8))]))
    expected = torch.cat(exact.log_probs(batch, [list(range(8))]))
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    assert all(tensor.dtype == torch.float32 for _, tensor in rounded.named_weights())
    for trainer in (exact, rounded):
        trainer.train_step(batch, [list(range(8))], weighted_loss(batch))
    cosine = torch.cosine_similarity(exact.optimizer.grads, rounded.optimizer.grads, dim=0)
    assert cosine > 0.99


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_is_close_to_cpu(make_args: MakeArgs, make_batch: MakeBatch, dtype: str) -> None:
    batch = make_batch(8)
    cpu, gpu = EmbeddedTrainer(make_args()), EmbeddedTrainer(make_args(device="cuda", dtype=dtype))
    tolerance = 1e-3 if dtype == "float32" else 0.1
    for a, b in zip(gpu.log_probs(batch, [[*range(8)]]), cpu.log_probs(batch, [[*range(8)]]), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)

    def loss_fn(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -output.log_probs.mean(), {}

    for trainer in (cpu, gpu):
        trainer.train_step(batch, [[*range(8)]], loss_fn)
    assert torch.cosine_similarity(gpu.optimizer.grads.cpu(), cpu.optimizer.grads, dim=0) > 0.99


def test_samples_without_response_and_a_loss_without_gradient(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = EmbeddedTrainer(make_args(weight_decay=0.0)), make_batch(2)
    batch.response_lengths = [0, 0]
    before = trainer.optimizer.values.clone()
    assert [t.shape for t in trainer.log_probs(batch, [[0, 1]])] == [(0,), (0,)]
    connected = trainer.train_step(batch, [[0, 1]], lambda out: (out.log_probs.sum(), {})).metrics
    constant = trainer.train_step(batch, [[0, 1]], lambda out: (torch.zeros(()), {})).metrics
    assert connected["grad_norm"] == constant["grad_norm"] == 0.0
    assert torch.equal(trainer.optimizer.values, before)


def test_the_old_actor_stays_until_it_is_updated(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    batch, micro_batches = make_batch(4), [[0, 1, 2, 3]]
    trainer = EmbeddedTrainer(make_args(keep_old_actor=True))

    def of(role: Literal["actor", "old_actor"], trainer: EmbeddedTrainer = trainer) -> torch.Tensor:
        return torch.cat(trainer.log_probs(batch, micro_batches, role=role))

    start = of("actor")
    assert torch.equal(of("old_actor"), start)
    trainer.train_step(batch, micro_batches, weighted_loss(batch))
    stepped = of("actor")
    assert torch.equal(of("old_actor"), start)
    trainer.update_old_actor()
    trainer.save(tmp_path / "same")
    trainer.train_step(batch, micro_batches, weighted_loss(batch))
    assert torch.equal(of("old_actor"), stepped)
    trainer.save(tmp_path / "behind")
    stored = [(tmp_path / name / "trainer" / "old_actor.safetensors").is_file() for name in ("same", "behind")]
    assert stored == [False, True]
    again = EmbeddedTrainer(make_args(keep_old_actor=True))
    again.load(tmp_path / "behind")
    assert torch.equal(of("old_actor", again), stepped)
    assert torch.equal(of("actor", again), of("actor"))
    again.load(tmp_path / "same")
    assert torch.equal(of("old_actor", again), stepped)
    assert torch.equal(of("actor", again), stepped)


def test_calls_that_cannot_be_served(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, batch = EmbeddedTrainer(make_args()), make_batch(3)
    with pytest.raises(TrainError, match=r"\[1\] are in no micro-batch"):
        trainer.log_probs(batch, [[0], [2]])
    with pytest.raises(TrainError, match=r"no 'ref' model.*--kl-coef"):
        trainer.log_probs(batch, [[0, 1, 2]], role="ref")
    with pytest.raises(TrainError, match="no 'teacher' model"):
        trainer.log_probs(batch, [[0, 1, 2]], role="teacher")
    with pytest.raises(TrainError, match="no 'ref' model"):
        trainer.update_reference()
    with pytest.raises(TrainError, match="no 'old_actor' model; it is kept with --keep-old-actor"):
        trainer.update_old_actor()
    with pytest.raises(TrainError, match="without micro-batches"):
        trainer.train_step(batch, [], weighted_loss(batch))


def test_the_reference_stays_until_it_is_updated(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer, batch = EmbeddedTrainer(make_args(kl_coef=0.1)), make_batch(4)
    micro_batches = [[0, 1, 2, 3]]
    first = torch.cat(trainer.log_probs(batch, micro_batches, role="ref"))
    assert torch.equal(first, torch.cat(trainer.log_probs(batch, micro_batches)))
    trainer.train_step(batch, micro_batches, weighted_loss(batch))
    assert torch.equal(first, torch.cat(trainer.log_probs(batch, micro_batches, role="ref")))
    trainer.update_reference()
    moved = torch.cat(trainer.log_probs(batch, micro_batches, role="ref"))
    assert torch.equal(moved, torch.cat(trainer.log_probs(batch, micro_batches)))
    trainer.train_step(batch, micro_batches, weighted_loss(batch))
    trainer.save(tmp_path / "out")
    again = EmbeddedTrainer(make_args(kl_coef=0.1))
    again.load(tmp_path / "out")
    assert torch.equal(moved, torch.cat(again.log_probs(batch, micro_batches, role="ref")))


@pytest.mark.parametrize("flag", ["freeze_params_name_list", "only_train_params_name_list"])
def test_frozen_parameters_do_not_move(make_args: MakeArgs, make_batch: MakeBatch, flag: str) -> None:
    trainer, batch = EmbeddedTrainer(make_args(**{flag: [r"layers\.0\.mlp"]})), make_batch(4)
    before = weights(trainer)
    trainer.train_step(batch, [[0, 1, 2, 3]], weighted_loss(batch))
    for name, tensor in trainer.named_weights():
        moved = not torch.equal(before[name], tensor)
        assert moved == (("layers.0.mlp" in name) == (flag == "only_train_params_name_list")), name


def test_freezing_everything_or_giving_both_lists_is_refused(make_args: MakeArgs) -> None:
    with pytest.raises(ConfigError, match="no parameter is left"):
        EmbeddedTrainer(make_args(freeze_params_name_list=["."]))
    with pytest.raises(ConfigError, match="freeze-params-name-list linear_qkv: no parameter has such a name"):
        EmbeddedTrainer(make_args(freeze_params_name_list=["linear_qkv"]))
    with pytest.raises(ConfigError, match="one of the two"):
        EmbeddedTrainer(make_args(freeze_params_name_list=["x"], only_train_params_name_list=["y"]))


# -- a teacher, entropies, logits ------------------------------------------------------------------------


def test_every_row_has_the_divergence_from_its_own_teacher(
    make_args: MakeArgs, make_batch: MakeBatch, make_model: Callable[..., Path], model_dir: Path
) -> None:
    """KL(policy || teacher) over the vocabulary, of transformers' models in float64; rows come in any order."""
    sizes: dict[str, dict[str, Any]] = {"first": {}, "math": {}, "code": {"hidden_size": 16, "num_hidden_layers": 1}}
    paths = {name: make_model(name, seed=7 + i, **sizes[name]) for i, name in enumerate(sizes)}
    named = {name: {"path": str(paths[name])} for name in ("math", "code")} | {"again": {"path": str(paths["math"])}}
    args = make_args(
        use_opd=True, opd_type="megatron", opd_teacher_load=str(paths["first"]), loss_type="distillation",
        rollout_temperature=0.7, lr=0.0,
        plugins={"on_policy_distillation": {"teachers": named}, "distillation": {"top_k": 61}},
    )  # fmt: skip
    trainer, batch = EmbeddedTrainer(args), make_batch(8)
    rows = ["math", None, "code", "math", "code", None, "again", "code"]
    batch.train_metadata = [name and {"teacher": name} for name in rows]
    assert set(trainer._frozen._models) == {"teacher", "teacher.math", "teacher.code"}, "one model a directory"
    micro_batches, loss = [[3, 0, 5], [1, 2, 4], [7, 6]], Distillation(args, GRPO(args))
    q = loss.teacher_log_probs(trainer, batch, micro_batches, role="teacher")
    p = trainer.log_probs(batch, micro_batches)
    columns = TrainTensors.from_batch(batch, trainer.device)
    columns.teacher_log_probs, columns.old_log_probs = q, p
    columns.advantages = [torch.zeros(n) for n in batch.response_lengths]

    def float64(directory: Path) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        with torch.no_grad():
            logits = [model(torch.tensor([row])).logits[0] / 0.7 for row in batch.tokens]
        return [x[-n - 1 : -1].log_softmax(-1) for x, n in zip(logits, batch.response_lengths, strict=True)]

    policy, own = float64(model_dir), {name: float64(path) for name, path in paths.items()}
    for i, name in enumerate(rows):
        kl = {other: (policy[i].exp() * (policy[i] - scores[i])).sum(-1).mean().item() for other, scores in own.items()}
        expected = kl.pop("math" if name == "again" else name or "first")
        bound = loss.bind(batch, columns, Denominators.of(batch, [i], per_token=True))
        found = trainer.train_step(batch, [[i]], bound, with_entropy=True, with_logits=True).metrics["divergence"]
        assert found == pytest.approx(expected, rel=2e-5)
        assert all(abs(found - other) > 0.01 for other in kl.values())
    batch.train_metadata[4] = {"teacher": "art"}
    with pytest.raises(TrainError, match=r"sample 4: .* teacher 'art'; plugins.*teachers has math, code, again in"):
        trainer.log_probs(batch, micro_batches, role="teacher")


def test_teachers_that_do_not_fit_are_refused_before_a_start(make_model: Callable[..., Path], model_dir: Path) -> None:
    others = {name: make_model(name) for name in ("first", "same", "other", "no_tokenizer")}
    for directory, family in ((model_dir, "qwen3"), (others["same"], "qwen2.5"), (others["other"], "deepseek")):
        save(family, directory)
    argv = ["--hf-checkpoint", str(model_dir), "--use-opd", "--opd-type", "local"]

    def check(first: Path, math: Path) -> None:
        chosen = ["--set", f"plugins.on_policy_distillation.teachers={{math: {{path: {math}}}}}"]
        settings = load_settings([*argv, "--opd-teacher-load", str(first), *chosen], command="show", env={})
        EmbeddedTrainer.check_settings(settings)

    check(model_dir, others["same"])
    check(others["no_tokenizer"], others["same"])
    with pytest.raises(ConfigError, match=r"teachers.math.path '/nowhere': no model there. Looked for"):
        check(model_dir, Path("/nowhere"))
    words = r"other'?: its vocabulary is not that of --hf-checkpoint .*: \d+ ids differ, such as \d+, which is .* there"
    with pytest.raises(ConfigError, match=rf"^plugins.on_policy_distillation.teachers.math.path .*{words}"):
        check(model_dir, others["other"])
    with pytest.raises(ConfigError, match=r"^--opd-teacher-load '.*other' \(flag\): its vocabulary is not"):
        check(others["other"], model_dir)


def test_a_teacher_follows_and_is_resumed(
    make_args: MakeArgs, make_batch: MakeBatch, make_model: Callable[..., Path], model_dir: Path, tmp_path: Path
) -> None:
    flags = {"use_opd": True, "opd_type": "local", "opd_teacher_load": str(model_dir)}
    trainer = EmbeddedTrainer(make_args(**flags))
    before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    with torch.no_grad():
        for _, tensor in trainer.named_weights():
            tensor += torch.randn_like(tensor)
    trainer.update_teacher(0.25)
    trainer.update_teacher(0.5)
    teacher = tensors(trainer._frozen["teacher"])
    for name, tensor in trainer.named_weights():  # 0.75 * 0.5 of the first weights are left
        torch.testing.assert_close(teacher[name], 0.375 * before[name] + 0.625 * tensor, rtol=1e-6, atol=1e-6)
    trainer.save(tmp_path / "commit")
    resumed = EmbeddedTrainer(make_args(**flags))
    resumed.load(tmp_path / "commit")
    assert all(torch.equal(tensor, teacher[name]) for name, tensor in tensors(resumed._frozen["teacher"]).items())
    small = make_model("small", seed=7, hidden_size=16, num_hidden_layers=1, tie_word_embeddings=False)
    with pytest.raises(TrainError, match=r"small: a teacher that follows the actor has its tensors, and .* differ"):
        EmbeddedTrainer(make_args(**{**flags, "opd_teacher_load": str(small)})).update_teacher(0.1)


def test_a_teacher_that_does_not_know_every_token(
    make_args: MakeArgs, make_batch: MakeBatch, make_model: Callable[..., Path]
) -> None:
    flags = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(make_model("teacher", vocab_size=3))}
    trainer, batch = EmbeddedTrainer(make_args(**flags)), make_batch(5)
    with pytest.raises(TrainError, match=r"outside the model's vocabulary of 3; .* --opd-teacher-load"):
        trainer.log_probs(batch, [list(range(5))], role="teacher")
    trainer.log_probs(batch, [list(range(5))])


def test_a_reference_of_another_architecture_cannot_be_updated(
    make_args: MakeArgs, make_model: Callable[..., Path]
) -> None:
    flags = {"use_kl_loss": True, "ref_load": str(make_model("ref", num_hidden_layers=1))}
    EmbeddedTrainer(make_args(**flags))
    with pytest.raises(ConfigError, match=r"^--ref-update-interval copies .* --ref-load .*/ref is another arch"):
        EmbeddedTrainer(make_args(**flags, ref_update_interval=2))


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_on_logits_is_the_same_step(
    make_args: MakeArgs, make_batch: MakeBatch, make_model: Callable[..., Path], tied: bool
) -> None:
    directory = make_model("other", seed=7, tie_word_embeddings=tied)
    batch, flags = make_batch(6), {"hf_checkpoint": str(directory), "rollout_temperature": 0.7}
    plain, full = EmbeddedTrainer(make_args(**flags)), EmbeddedTrainer(make_args(**flags))
    seen = []

    def through_logits(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert output.logits is not None
        part = batch.select(output.positions)
        log_probs, entropy = response_log_probs(
            output.logits, part.tokens, part.response_lengths, 0.7, with_entropy=True
        )
        assert entropy is not None
        torch.testing.assert_close(torch.cat(log_probs), output.log_probs)
        seen.append(output.logits.shape)
        return weighted_loss(batch, 0.01)(MicroBatchOutput(output.positions, torch.cat(log_probs), torch.cat(entropy)))

    a = plain.train_step(batch, [[0, 3, 5], [1, 2, 4]], weighted_loss(batch, 0.01), with_entropy=True).metrics
    b = full.train_step(batch, [[0, 3, 5], [1, 2, 4]], through_logits, with_logits=True).metrics
    assert seen == [(1, sum(len(batch.tokens[i]) for i in mb), 61) for mb in ([0, 3, 5], [1, 2, 4])]
    assert a == pytest.approx(b, rel=1e-5)
    torch.testing.assert_close(full.optimizer.grads, plain.optimizer.grads, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("gib", "processes", "changes", "tokens"),
    [(1024, 1, {}, 4096), (16, 2, {}, 3072), (6, 1, {}, 1024), (6, 1, {"lora_rank": 8}, 2048)],
)
def test_passes_take_half_of_the_memory_that_is_left(
    gib: int, processes: int, changes: dict[str, Any], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SmolLM2-135M's shape: 31 x 8,448 float32 elements a token, 2.15 GB of weights, gradients and moments."""
    hf = {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(4 * 134_515_008)
    monkeypatch.setattr("slime_embedded.trainer.trainer.main_memory", lambda: gib << 30)
    given = {"lora_rank": None, "actor_num_nodes": 1, "max_tokens_per_gpu": 4096, **changes}
    args: Any = SimpleNamespace(device="cpu", hf_checkpoint=str(tmp_path), **given)
    assert EmbeddedTrainer.tokens_that_fit(args, processes) == tokens


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
