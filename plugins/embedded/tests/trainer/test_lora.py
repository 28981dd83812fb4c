"""Adapters in the embedded trainer: against PEFT, against the engine's bits, and through checkpoints."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from slime_embedded.models.lora_linear import adapter_weights, base_weights, merged_weights
from slime_embedded.trainer.trainer import EmbeddedTrainer
from slime_testing_contracts.tiny import tiny_moe_model
from transformers import AutoModelForCausalLM

from slime_core.config import Args, load_settings
from slime_core.errors import CheckpointError, ConfigError, TrainError
from slime_core.protocols import MicroBatchOutput
from slime_core.sample import TrainBatch

MakeArgs = Callable[..., Args]
MakeBatch = Callable[..., TrainBatch]
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8.0}
MICRO = [[0, 1], [2, 3]]


def loss(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    value = -output.log_probs.mean()
    return value, {"loss": value}


def noisy_loss(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Depends on the global random states, so that a continuation shows whether they were restored."""
    value = -((torch.rand_like(output.log_probs) + random.random()) * output.log_probs).mean()
    return value, {"loss": value}


def train(trainer: EmbeddedTrainer, make_batch: MakeBatch, steps: range, loss_fn: Any = loss) -> list[dict[str, float]]:
    return [trainer.train_step(make_batch(4, seed=s), MICRO, loss_fn).metrics for s in steps]


def weights(trainer: EmbeddedTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def test_it_starts_as_the_base_and_trains_the_adapters_alone(
    make_args: MakeArgs, make_batch: MakeBatch, model_dir: Path
) -> None:
    trainer, plain = EmbeddedTrainer(make_args(**LORA)), EmbeddedTrainer(make_args())
    batch = make_batch(4)
    for a, b in zip(trainer.log_probs(batch, MICRO), plain.log_probs(batch, MICRO), strict=True):
        assert torch.equal(a, b)
    assert set(trainer.optimizer.shapes) == set(adapter_weights(trainer.model))
    assert len(trainer.optimizer.values) < len(plain.optimizer.values) / 2
    train(trainer, make_batch, range(2))
    stored = load_file(model_dir / "model.safetensors")
    for name, tensor in base_weights(trainer.model).items():
        assert torch.equal(tensor, stored[name])
    changed = {name for name, tensor in trainer.named_weights() if not torch.equal(tensor, stored[name])}
    assert changed == {name for name in stored if "proj" in name}
    assert list(weights(trainer)) == list(weights(plain)), "engines get HF names, without adapters"
    trainer.settings = replace(trainer.settings, lora_unmerged=True)
    sent = weights(trainer)
    assert set(sent) == set(adapter_weights(trainer.model))
    for name, tensor in merged_weights(trainer.model):
        if (down := f"{name.removesuffix('.weight')}.lora_A") in sent:
            added = sent[down.replace("lora_A", "lora_B")] @ sent[down]
            torch.testing.assert_close(stored[name] + added, tensor, rtol=1e-6, atol=1e-7)


def test_three_steps_equal_peft(make_args: MakeArgs, make_batch: MakeBatch, model_dir: Path) -> None:
    import peft

    flags = {
        "lr": 1e-2,
        "weight_decay": 0.1,
        "clip_grad": 0.5,
        "lora_target_modules": ["q_proj", "v_proj", "down_proj"],
    }
    trainer = EmbeddedTrainer(make_args(**LORA, **flags))
    config = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules=list(flags["lora_target_modules"]))
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_dir), config)
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, tensor in adapter_weights(trainer.model).items():
            theirs[name].copy_(tensor)
    assert set(theirs) == set(adapter_weights(trainer.model))
    plain = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.1)
    for step in range(3):
        batch = make_batch(4, seed=step)
        result = trainer.train_step(batch, [[0, 1, 2, 3]], loss).metrics
        plain.zero_grad()
        parts = []
        for tokens, response in zip(batch.tokens, batch.response_lengths, strict=True):
            ids = torch.tensor(tokens)
            log_p = torch.log_softmax(model(ids[None]).logits[0, -response - 1 : -1], dim=-1)
            parts.append(log_p.gather(-1, ids[-response:, None]).squeeze(-1))
        expected = -torch.cat(parts).mean()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        plain.step()
        assert result["loss"] == pytest.approx(expected.item(), rel=1e-5)
        assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, tensor in adapter_weights(trainer.model).items():
        torch.testing.assert_close(tensor, theirs[name].detach(), rtol=1e-4, atol=1e-5, msg=name)
    whole = dict(model.merge_and_unload().named_parameters())
    for name, tensor in trainer.named_weights():
        torch.testing.assert_close(tensor, whole[name].detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"]])
def test_peft_opens_the_adapter_and_transformers_the_merged_model(
    make_args: MakeArgs, make_batch: MakeBatch, model_dir: Path, tmp_path: Path, targets: list[str]
) -> None:
    import peft

    trainer = EmbeddedTrainer(make_args(**LORA, lora_target_modules=targets))
    train(trainer, make_batch, range(2))
    trainer.save(tmp_path / "checkpoint")
    ids = torch.tensor([3, 4, 5, 6, 7])
    expected = trainer.model(ids, [5])
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    assert not torch.allclose(base(ids[None]).logits[0], expected, atol=1e-2)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "checkpoint" / "adapter")
    torch.testing.assert_close(with_adapter(ids[None]).logits[0], expected, rtol=1e-4, atol=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    torch.testing.assert_close(whole(ids[None]).logits[0], expected, rtol=1e-4, atol=1e-5)
    for name, tensor in trainer.named_weights():
        assert torch.equal(dict(whole.named_parameters())[name], tensor)


def test_log_probs_are_the_engines_bit_for_bit_in_true_on_policy_mode(
    make_args: MakeArgs, make_batch: MakeBatch, model_dir: Path, tmp_path: Path
) -> None:
    """The engine knows merged weights only: a trainer without adapters that has them stands for it."""
    trainer = EmbeddedTrainer(make_args(**LORA, true_on_policy_mode=True))
    train(trainer, make_batch, range(2))
    trainer.save(tmp_path / "served")
    served = EmbeddedTrainer(make_args(hf_checkpoint=str(tmp_path / "served"), true_on_policy_mode=True))
    fast = EmbeddedTrainer(make_args(**LORA))
    fast.load(tmp_path / "served")
    batch = make_batch(6, seed=9)
    micro = [[0, 1, 2], [3, 4, 5]]
    for a, b in zip(trainer.log_probs(batch, micro), served.log_probs(batch, micro), strict=True):
        assert torch.equal(a, b)
    pairs = list(zip(fast.log_probs(batch, micro), served.log_probs(batch, micro), strict=True))
    assert not all(torch.equal(a, b) for a, b in pairs), "without the mode the two differ, so the test can fail"
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# -- reference, old actor ----------------------------------------------------------------------------------


def test_the_reference_is_the_base_and_takes_no_memory(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer, plain = EmbeddedTrainer(make_args(**LORA, use_kl_loss=True)), EmbeddedTrainer(make_args())
    train(trainer, make_batch, range(2))
    batch = make_batch(4, seed=5)
    for a, b in zip(trainer.log_probs(batch, MICRO, role="ref"), plain.log_probs(batch, MICRO), strict=True):
        assert torch.equal(a, b)
    reference = {p.data_ptr() for p in trainer._frozen["ref"].parameters()}
    assert reference == {tensor.data_ptr() for tensor in base_weights(trainer.model).values()}


def test_a_reference_that_is_updated_gets_the_merged_weights(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path
) -> None:
    flags = {**LORA, "use_kl_loss": True, "ref_update_interval": 1, "keep_old_actor": True}
    trainer = EmbeddedTrainer(make_args(**flags))
    train(trainer, make_batch, range(2))
    trainer.update_reference()
    trainer.update_old_actor()
    merged = weights(trainer)
    train(trainer, make_batch, range(2, 3))
    trainer.save(tmp_path / "checkpoint")
    again = EmbeddedTrainer(make_args(**flags))
    again.load(tmp_path / "checkpoint")
    for one in (trainer, again):
        for role in ("ref", "old_actor"):
            for name, parameter in one._frozen[role].named_parameters():
                assert torch.equal(parameter, merged[name])
    assert not all(torch.equal(merged[name], tensor) for name, tensor in trainer.named_weights())


# -- checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"save_dtype": "bfloat16", "freeze_params_name_list": [r"layers\.0\."]}])
def test_two_plus_two_steps_equal_four(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, flags: dict[str, Any]
) -> None:
    def seeded() -> EmbeddedTrainer:
        torch.manual_seed(7)
        random.seed(7)
        return EmbeddedTrainer(make_args(**LORA, **flags))

    straight = seeded()
    metrics = train(straight, make_batch, range(4), noisy_loss)
    first = seeded()
    train(first, make_batch, range(2), noisy_loss)
    first.save(tmp_path / "checkpoint")
    torch.manual_seed(99)
    random.seed(99)
    second = EmbeddedTrainer(make_args(**LORA, **flags, seed=5))
    second.load(tmp_path / "checkpoint")
    assert train(second, make_batch, range(2, 4), noisy_loss) == metrics[2:]
    for name, tensor in adapter_weights(straight.model).items():
        assert torch.equal(adapter_weights(second.model)[name], tensor)
    for name, moment in straight.optimizer.moments().items():
        assert torch.equal(second.optimizer.moments()[name], moment)


def test_another_base_is_refused(make_args: MakeArgs, make_model: Callable[..., Path], tmp_path: Path) -> None:
    EmbeddedTrainer(make_args(**LORA)).save(tmp_path / "checkpoint")
    other = EmbeddedTrainer(make_args(**LORA, hf_checkpoint=str(make_model("other", seed=3))))
    with pytest.raises(CheckpointError, match=r"trained on other weights than --hf-checkpoint .*other: merged, model"):
        other.load(tmp_path / "checkpoint")


def test_runs_with_and_without_adapters_do_not_go_on_from_each_other(make_args: MakeArgs, tmp_path: Path) -> None:
    EmbeddedTrainer(make_args()).save(tmp_path / "plain")
    EmbeddedTrainer(make_args(**LORA)).save(tmp_path / "adapted")
    finetune = EmbeddedTrainer(make_args(**LORA, finetune=True))
    with pytest.raises(CheckpointError, match=r"no adapters in it .* name it as --hf-checkpoint"):
        finetune.load(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"trained parameter .*lora_A: .* then, not trained now"):
        EmbeddedTrainer(make_args()).load(tmp_path / "adapted")
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_A: \(4, 32\) then, \(2, 32\) now"):
        EmbeddedTrainer(make_args(lora_rank=2)).load(tmp_path / "adapted")
    merged = EmbeddedTrainer(make_args(finetune=True))
    merged.load(tmp_path / "adapted")
    assert len(merged.optimizer.shapes) > len(finetune.optimizer.shapes) / 2


# -- what is not adapted -----------------------------------------------------------------------------------


def test_parameters_are_chosen_by_name_among_the_adapters(make_args: MakeArgs) -> None:
    trainer = EmbeddedTrainer(make_args(**LORA, only_train_params_name_list=["q_proj"]))
    assert {name.split(".")[-2] for name in trainer.optimizer.shapes} == {"q_proj"}
    with pytest.raises(ConfigError, match="no parameter is left to train"):
        EmbeddedTrainer(make_args(**LORA, only_train_params_name_list=["embed_tokens"]))


def test_a_mixture_of_experts_trains_what_all_tokens_go_through(make_batch: MakeBatch, tmp_path: Path) -> None:
    args = Args(hf_checkpoint=str(tiny_moe_model()), device="cpu", lr=1e-2, lr_decay_style="constant", **LORA)
    trainer = EmbeddedTrainer(args)
    before = weights(trainer)
    batch = make_batch(4)
    trainer.train_step(batch, MICRO, loss)
    changed = {name for name, tensor in trainer.named_weights() if not torch.equal(tensor, before[name])}
    assert changed
    assert not {name for name in changed if ".experts." in name or ".gate." in name}
    trainer.save(tmp_path / "checkpoint")
    again = EmbeddedTrainer(args)
    again.load(tmp_path / "checkpoint")
    for a, b in zip(again.log_probs(batch, MICRO), trainer.log_probs(batch, MICRO), strict=True):
        assert torch.equal(a, b)


# -- several adapters --------------------------------------------------------------------------------------

TWO: dict[str, Any] = {**LORA, "lora_adapters": ["planner", "solver"]}


def named(batch: TrainBatch, *adapters: str | None) -> TrainBatch:
    batch.train_metadata = [name and {"adapter": name} for name in adapters]  # type: ignore[misc]
    return batch


def total(output: MicroBatchOutput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over tokens, so that a sample's gradient does not depend on the others."""
    value = -output.log_probs.sum()
    return value, {"loss": value}


def of(trainer: EmbeddedTrainer, name: str) -> dict[str, torch.Tensor]:
    return adapter_weights(trainer._policies[name].model)


def test_engines_get_every_adapter(make_args: MakeArgs) -> None:
    trainer = EmbeddedTrainer(make_args(**TWO))
    merged = {name for name, _ in merged_weights(trainer.model)}
    others = {name.removeprefix("adapters.solver.") for name in weights(trainer) if name.startswith("adapters.solver.")}
    assert others < merged
    trainer.settings = replace(trainer.settings, lora_unmerged=True)
    sent, scale = weights(trainer), 2.0
    own = {"": of(trainer, ""), **{f"adapters.{name}.": of(trainer, name) for name in ("planner", "solver")}}
    assert set(sent) == {f"{begin}{name}" for begin, part in own.items() for name in part}
    for begin, part in own.items():
        assert all(torch.equal(sent[f"{begin}{n}"], t * (scale if n.endswith("B") else 1)) for n, t in part.items())


def test_an_adapter_may_have_a_learning_rate_of_its_own(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    own = {"embedded": {"adapter_lr": {"solver": 3e-3}}}
    trainer = EmbeddedTrainer(make_args(**TWO, lr=1e-2, lr_warmup_iters=2, plugins=own))
    batch = named(make_batch(4), "planner", "solver", None, "solver")
    for _ in range(2):
        trainer.train_step(batch, [[0], [1, 3], [2]], total)
    rates = {name: optimizer.schedule.at(optimizer.steps) for name, optimizer in trainer._optimizers.items()}
    assert rates == pytest.approx({"": 1e-2, "planner": 1e-2, "solver": 3e-3})
    argv = ["--lora-rank", "4", "--lora-adapters", "planner", "solver"]
    settings = load_settings([*argv, "--set", "plugins.embedded.adapter_lr={critic: 0.001}"], command="show", env={})
    with pytest.raises(ConfigError, match="adapter_lr: no adapter 'critic'; --lora-adapters has planner solver"):
        EmbeddedTrainer.check_settings(settings)


def test_each_adapter_gets_the_gradient_of_its_samples(
    make_args: MakeArgs, make_batch: MakeBatch, model_dir: Path
) -> None:
    """Against PEFT's adapters in float64, one pass per sample; the samples of a packed batch alternate."""
    import peft

    trainer = EmbeddedTrainer(make_args(**TWO, clip_grad=0.0))
    config = peft.LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear")
    base = AutoModelForCausalLM.from_pretrained(model_dir).double()
    model: Any = peft.get_peft_model(base, config, adapter_name="planner").double()
    model.add_adapter("solver", config)
    model = model.double()
    theirs: dict[str, dict[str, Any]] = {name: {} for name in ("planner", "solver")}
    generator = torch.Generator().manual_seed(5)
    for name, parameters in theirs.items():
        for key, parameter in model.named_parameters():
            if f".{name}." in key:
                parameters[key.removeprefix("base_model.model.").replace(f".{name}.weight", "")] = parameter
        assert set(parameters) == set(of(trainer, name))
        for key, tensor in of(trainer, name).items():
            if key.endswith("lora_B"):
                tensor.normal_(0, 0.1, generator=generator)
            parameters[key].data = tensor.double()
    adapters = ["planner", "solver", "solver", "planner"]
    batch = named(make_batch(4), *adapters)
    result = trainer.train_step(batch, [[0, 1, 2, 3]], total)
    norms = {}
    for name, parameters in theirs.items():
        model.set_adapter(name)
        for position, own in enumerate(adapters):
            if own != name:
                continue
            ids, response = torch.tensor(batch.tokens[position]), batch.response_lengths[position]
            log_p = torch.log_softmax(model(ids[None]).logits[0, -response - 1 : -1], dim=-1)
            found = log_p.gather(-1, ids[-response:, None]).squeeze(-1)
            torch.testing.assert_close(result.log_probs[position].double(), found.detach(), rtol=1e-4, atol=1e-5)
            (-found.sum()).backward()
        optimizer = trainer._policies[name].optimizer
        for key, parameter in parameters.items():
            torch.testing.assert_close(
                optimizer._view(optimizer.grads, key).double(),
                parameter.grad,
                rtol=1e-3,
                atol=1e-5,
                msg=f"{name} {key}",
            )
        norms[name] = torch.cat([p.grad.flatten() for p in parameters.values()]).norm().item()
    metrics = result.metrics
    assert metrics["grad_norm"] == pytest.approx((norms["planner"] ** 2 + norms["solver"] ** 2) ** 0.5, rel=1e-4)
    assert [metrics[f"grad_norm/{name}"] for name in (*norms, "shared")] == [
        pytest.approx(norms["planner"], rel=1e-4), pytest.approx(norms["solver"], rel=1e-4), 0.0,
    ]  # fmt: skip


@pytest.mark.parametrize("flags", [{}, {"true_on_policy_mode": True}])
def test_an_adapter_learns_as_in_a_run_of_its_own(
    make_args: MakeArgs, make_batch: MakeBatch, flags: dict[str, Any]
) -> None:
    """Bit for bit: other adapters' samples in a batch, and steps without a sample of it, change nothing."""
    both, alone = (
        EmbeddedTrainer(make_args(**{**TWO, **flags, "lora_adapters": names, "clip_grad": 0.5}))
        for names in (["planner", "solver"], ["solver"])
    )
    start = weights(both)
    for step in range(4):
        batch = make_batch(4, seed=step)
        adapters = ["planner"] * 4 if step == 2 else ["planner", "solver", "solver", "planner"]
        both.train_step(named(batch, *adapters), [[0, 1, 2, 3]], total)
        if step != 2:
            alone.train_step(named(batch.select([1, 2]), "solver", "solver"), [[0, 1]], total)
    assert all(torch.equal(tensor, of(alone, "solver")[name]) for name, tensor in of(both, "solver").items())
    ended = weights(both)
    moved = {name for name, tensor in ended.items() if not torch.equal(tensor, start[name])}
    assert moved == {name for name in start if name.startswith(("adapters.planner.", "adapters.solver."))}
    first = next(name for name in moved if name.startswith("adapters.planner."))
    assert not torch.equal(ended[first], ended[first.replace("planner", "solver")])


def test_a_masked_sample_does_not_step_its_adapter(make_args: MakeArgs, make_batch: MakeBatch) -> None:
    trainer = EmbeddedTrainer(make_args(**TWO, weight_decay=0.5))
    before = {name: tensor.clone() for name, tensor in of(trainer, "solver").items()}
    batch = named(make_batch(2), "planner", "solver")
    batch.loss_masks[1] = [0] * batch.response_lengths[1]
    trainer.train_step(batch, [[0, 1]], total)
    assert all(torch.equal(tensor, before[name]) for name, tensor in of(trainer, "solver").items())
    assert [p.optimizer.steps for p in trainer._policies.values()] == [0, 1, 0]


@pytest.mark.parametrize("flags", [{}, {"save_dtype": "bfloat16", "reset_optimizer_states": True}])
def test_two_plus_two_steps_of_several_adapters_equal_four(
    make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path, flags: dict[str, Any]
) -> None:
    def steps(trainer: EmbeddedTrainer, numbers: range) -> list[dict[str, float]]:
        names = ["planner", "solver", None, "planner"]
        batches = [named(make_batch(4, seed=s, rollout_id=s), *names[s % 3 :], *names[: s % 3]) for s in numbers]
        return [trainer.train_step(batch, MICRO, noisy_loss).metrics for batch in batches]

    random.seed(7)
    torch.manual_seed(7)
    straight = EmbeddedTrainer(make_args(**TWO, **flags))
    metrics = steps(straight, range(2))
    straight.save(tmp_path / "checkpoint")
    metrics += steps(straight, range(2, 4))
    random.seed(99)
    again = EmbeddedTrainer(make_args(**TWO, **flags, seed=5))
    again.load(tmp_path / "checkpoint")
    assert steps(again, range(2, 4)) == metrics[2:]
    for name in ("", "planner", "solver"):
        assert all(torch.equal(tensor, of(again, name)[key]) for key, tensor in of(straight, name).items())
        moments, restored = (one._policies[name].optimizer.moments() for one in (straight, again))
        assert all(torch.equal(restored[key], moment) for key, moment in moments.items())
    files = {p.name for p in (tmp_path / "checkpoint" / "adapters" / "solver").rglob("*.*")}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "state.json", "optimizer.safetensors"}


def test_adapters_that_do_not_fit(make_args: MakeArgs, make_batch: MakeBatch, tmp_path: Path) -> None:
    trainer = EmbeddedTrainer(make_args(**TWO))
    with pytest.raises(TrainError, match=r"sample 1: its train_metadata names the adapter 'judge'; .* planner solver"):
        trainer.train_step(named(make_batch(2), None, "judge"), [[0, 1]], total)
    trainer.save(tmp_path / "checkpoint")
    for flags, now in ((LORA, "not given"), ({**LORA, "lora_adapters": ["solver"]}, "solver")):
        with pytest.raises(CheckpointError, match=f"--lora-adapters was planner solver, is {now}"):
            EmbeddedTrainer(make_args(**flags)).load(tmp_path / "checkpoint")
