"""The zoo: bugs of trainers that train on without a word, as they were reported, planted into a run of slime.

`after` is the rollout, counted from 1, in which the run's own numbers gave the bug away; `check` is what named it. None: not
caught, and `why` says so. `test_zoo.py` holds every entry to it and `docs/silent-bugs.md` is made of them.
"""

# ruff: noqa: E501 - a row of the table is a line

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean, pstdev, stdev
from typing import Any

import torch

from slime_core.types import NOT_SAMPLED
from tests.zoo import plant
from tests.zoo.plant import Plant, rolled


@dataclass(frozen=True)
class Bug:
    """One silent bug."""

    name: str
    what: str
    source: str
    """Project and number of an issue or pull request; empty where it is folklore."""
    plant: Plant
    check: str | None
    after: int = 1
    why: str = ""
    """Why it is not caught."""
    settings: Mapping[str, Any] = field(default_factory=dict)


def _by_group(rewards: list[float], groups: list[int], of: Any) -> list[float]:
    return [of([r for r, g in zip(rewards, groups) if g == group], reward) for reward, group in zip(rewards, groups)]


def _masks(change: Any) -> Plant:
    def of(batch: Any) -> None:
        batch.loss_masks = [change(mask) for mask in batch.loss_masks]

    return plant.batches(of)


def _column(name: str, change: Any) -> Plant:
    def of(batch: Any) -> None:
        setattr(batch, name, [change(row) for row in getattr(batch, name)])

    return plant.batches(of)


def _reject_after(batch: Any) -> None:
    seen: set[int] = set()
    for position, group in enumerate(batch.group_indices):
        if group not in seen and batch.rewards[position]:
            seen.add(group)
            batch.loss_masks[position] = [0] * len(batch.loss_masks[position])


def _swap_rows(batch: Any) -> None:
    batch.rewards = rolled(batch.rewards)


def _tool_output(batch: Any) -> None:
    batch.token_weight_versions = [
        [NOT_SAMPLED if t == 1 else batch.weight_version for t in range(n)] for n in batch.response_lengths
    ]


def _newer(batch: Any) -> None:
    batch.token_weight_versions = [[batch.weight_version + 1] * n for n in batch.response_lengths]


def _fail(groups: list[list[Any]]) -> None:
    groups[0][0].status, groups[0][0].reward = "failed", 0.0
    groups[0][0].status = type(groups[0][1].status)("failed")


def _mix(groups: list[list[Any]]) -> None:
    a, b = groups[0][0], groups[1][0]
    a.group_index, b.group_index = b.group_index, a.group_index


def _mispair(groups: list[list[Any]]) -> None:
    for group in groups:
        for sample, reward in zip(group, rolled([s.reward for s in group])):
            sample.reward = reward


def _twice(groups: list[list[Any]]) -> None:
    for sample in (s for g in groups for s in g):
        sample.tokens = [sample.tokens[0], *sample.tokens]
        sample.spans = None


def _texts(groups: list[list[Any]]) -> None:
    for group in groups:
        for sample, text in zip(group, rolled([s.response for s in group])):
            sample.response = text


def _stale(weights: dict[str, torch.Tensor], first: dict[str, torch.Tensor], *names: str) -> None:
    for name in weights:
        if not names or any(part in name for part in names):
            weights[name] = first[name]


def _old(change: Any) -> Plant:
    """Of the old log-probs, computed before the first step."""

    def around(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = original(self, *args, **kwargs)
        tensors.old_log_probs = [change(part) for part in tensors.old_log_probs]
        return tensors

    return plant.wrapped("slime_core.learning.passes.Passes.run", around)


def _reference(change: Any) -> Plant:
    def around(original: Any, self: Any, *args: Any, role: str = "actor", **kwargs: Any) -> Any:
        found = original(self, *args, role=role, **kwargs)
        return [change(part) for part in found] if role == "ref" else found

    return plant.wrapped("slime_core.trainers.embedded.trainer.EmbeddedTrainer.log_probs", around)


def _following(original: Any, self: Any, *args: Any) -> Any:
    found = original(self, *args)
    self.trainer.update_reference()
    return found


def _dropout(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.nn.functional.dropout(original(*args, **kwargs), 0.3, training=torch.is_grad_enabled())


def _entropy_sign(original: Any, self: Any, *args: Any) -> Any:
    loss, terms = original(self, *args)
    turned = loss + 2 * self.args.entropy_coef * terms["entropy_loss"]
    return turned, terms | {"loss": turned.detach()}


def _kl_twice(original: Any, self: Any, *args: Any) -> Any:
    loss, terms = original(self, *args)
    turned = loss + self.args.kl_loss_coef * terms["kl_loss"]
    return turned, terms | {"loss": turned.detach()}


def _scaled(factor: float) -> Plant:
    weights = "slime_core.learning.tensors.Denominators.weights"
    return plant.wrapped(weights, lambda original, *args: original(*args) * factor)


def _targets(original: Any, hidden: Any, head: Any, targets: Any, **kwargs: Any) -> Any:
    return original(hidden, head, targets.roll(1), **kwargs)


def _lr(factor: float) -> Plant:
    at = "slime_core.trainers.embedded.schedule.LearningRateSchedule.at"
    return plant.wrapped(at, lambda original, *args: original(*args) * factor)


def _keep(*parts: str) -> Plant:
    def back(optimizer: Any, before: dict[str, torch.Tensor]) -> None:
        for name, values in before.items():
            if not parts or any(part in name for part in parts):
                optimizer._view(optimizer.values, name).copy_(values)

    return plant.after_steps(back)


def _no_gradient(optimizer: Any) -> None:
    for name in optimizer.shapes:
        if "q_proj" in name:
            optimizer._view(optimizer.grads, name).zero_()


def _backward(original: Any, loss: Any) -> None:
    original(loss / 4)


_KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
_ONE = {"rollout_max_response_len": 1, "n_samples_per_prompt": 8, "rollout_temperature": 0.1}
_COLD = {"rollout_temperature": 0.5}
_PLAIN = {"advantage_estimator": "reinforce_plus_plus"}
_OWN = {"use_rollout_entropy": True}

BUGS = (
    # -- rewards and groups
    Bug("std_of_the_batch", "the standard deviation is the batch's, not the group's", "Seg-Zero #104", plant.normalising(
        lambda r, g: _by_group(r, g, lambda own, x: (x - mean(own)) / (stdev(r) + 1e-6))), "advantages_deviate_by_one"),
    Bug("std_biased", "the standard deviation divides by n", "TorchFort #38", plant.normalising(
        lambda r, g: _by_group(r, g, lambda own, x: (x - mean(own)) / (pstdev(own) + 1e-6))), "advantages_deviate_by_one"),
    Bug("std_is_one", "an operator's precedence makes every standard deviation 1", "Open-Reasoner-Zero #75", plant.normalising(
        lambda r, g: _by_group(r, g, lambda own, x: x - mean(own))), "advantages_deviate_by_one"),
    Bug("mean_of_the_batch", "mean and deviation are taken over the batch", "grpo-flat #2", plant.normalising(
        lambda r, g: [(x - mean(r)) / (stdev(r) + 1e-6) for x in r]), "advantages_add_up"),
    Bug("mean_of_the_first", "only the first rollout makes the mean", "PipelineRL #54", plant.normalising(
        lambda r, g: _by_group(r, g, lambda own, x: (x - own[0]) / (stdev(own) + 1e-6))), "advantages_add_up"),
    Bug("no_baseline", "rewards are divided and not centred", "", plant.normalising(
        lambda r, g: _by_group(r, g, lambda own, x: x / (stdev(own) + 1e-6))), "advantages_add_up"),
    Bug("rejected_in_baseline", "rejected rows stay in the baseline", "verl #6452", plant.batches(_reject_after), "advantages_add_up"),
    Bug("sign_of_rewards", "the worse answer is encouraged", "", plant.normalising(
        lambda r, g: _by_group(r, g, lambda own, x: (mean(own) - x) / (stdev(own) + 1e-6))), "better_is_better"),
    Bug("rows_shifted", "normalised rewards go to the next row", "", plant.batches(_swap_rows), "advantages_add_up"),
    Bug("advantages_shuffled", "advantages are gathered in another order", "", plant.advantages(
        lambda a: [x * 0 + y[0] for x, y in zip(a, rolled(a))]), "advantage_of_its_sample"),
    Bug("advantage_sign", "the advantage's sign is turned on its way", "", plant.advantages(lambda a: [-x for x in a]), "advantage_of_its_sample"),
    Bug("discounted", "gamma < 1 discounts an outcome's reward", "", plant.advantages(
        lambda a: [x * 0.95 ** torch.arange(len(x)).flip(0) for x in a]), "advantage_of_its_sample"),
    Bug("advantages_clipped", "advantages are clipped", "", plant.advantages(lambda a: [x.clamp(-0.5, 0.5) for x in a]), "advantage_of_its_sample"),
    Bug("length_twice", "the advantage is divided by the length once more", "", plant.advantages(lambda a: [x / len(x) for x in a]), "advantage_of_its_sample"),
    Bug("last_token_only", "only the last token has the advantage", "", plant.advantages(
        lambda a: [x * (torch.arange(len(x)) == len(x) - 1) for x in a]), "advantage_of_its_sample"),
    Bug("whitened_twice", "normalised advantages are normalised once more over the batch", "reskill #12", plant.advantages(
        lambda a: [x * 1.3 - 0.1 for x in a]), "advantage_of_its_sample"),
    Bug("reward_of_the_prompt", "the grader parses the prompt", "", plant.nothing, "rewards_tell_answers_apart", 3,
        settings={"custom_rm_path": "tests.zoo.rewards:of_the_prompt"}),
    Bug("one_reward_for_all", "one reward is broadcast to its group", "", plant.samples(
        lambda groups: [setattr(s, "reward", g[0].reward) for g in groups for s in g][:0]), "rewards_tell_answers_apart", 3,
        settings={"rollout_max_response_len": 24}),
    Bug("always_right", "the grader says yes to everything", "", plant.nothing, "samples_carry_gradient", 3,
        settings={"custom_rm_path": "tests.zoo.rewards:always_right"}),
    Bug("reward_at_random", "the reward does not depend on the answer", "", plant.nothing, "reward_of_the_answer",
        settings={"custom_rm_path": "tests.zoo.rewards:at_random", **_ONE}),
    Bug("rewards_mispaired", "rewards come back in the order they finished, short answers", "", plant.samples(_mispair), "reward_of_the_answer",
        settings={"custom_rm_path": "tests.zoo.rewards:of_the_answer", **_ONE}),
    Bug("texts_mispaired", "texts are paired with other samples' tokens, short answers", "", plant.samples(_texts), "text_of_the_tokens",
        settings=_ONE),
    Bug("failed_scored", "a failed rollout is scored 0 and trains", "slime #1252", plant.samples(_fail), "failed_not_scored"),
    Bug("group_mixed", "group numbers are given out again after a drop", "NeMo-RL #3882", plant.samples(_mix), "group_of_one_prompt"),
    # -- tokens
    Bug("mask_late", "the mask is shifted by one to the right", "verl #3287", _masks(lambda m: [0, *m[:-1]]), "first_token_trains"),
    Bug("mask_early", "the mask is shifted by one to the left", "verl #3287", _masks(lambda m: [*m[1:], 0]), "end_trains"),
    Bug("tool_output_trains", "tool output is in the loss mask", "slime #1418", plant.batches(_tool_output), "mask_within_the_sampled"),
    Bug("versions_counted_twice", "a token's version is one too high", "prime-rl #3050", plant.batches(_newer), "versions_exist"),
    Bug("two_bos", "the tokenizer adds a BOS to a template that has one", "OpenRLHF #393", plant.samples(_twice), "one_start_token"),
    # -- log-probs
    Bug("log_probs_shifted", "the engine's log-probs are shifted by one", "ms-swift #8196", _column("rollout_log_probs", rolled), "engine_is_the_trainer"),
    Bug("log_probs_of_others", "the engine's log-probs are those of other rows", "", plant.batches(
        lambda b: setattr(b, "rollout_log_probs", [[-1.0] * len(x) for x in b.rollout_log_probs])), "engine_is_the_trainer"),
    Bug("untempered_trainer", "the trainer does not divide by the temperature", "trl #3029", plant.log_probs(
        lambda f, *a, **k: f(*a, **k | {"temperature": 1.0})), "engine_is_the_trainer", settings=_COLD),
    Bug("untempered_engine", "the engine's log-probs are those of temperature 1", "trl #4159", _column(
        "rollout_log_probs", lambda row: [0.5 * x for x in row]), "engine_is_the_trainer"),
    Bug("temperature_twice", "the temperature is applied twice", "NeMo-RL #935", plant.log_probs(
        lambda f, *a, **k: f(*a, **k | {"temperature": k["temperature"] ** 2})), "engine_is_the_trainer", settings=_COLD),
    Bug("targets_shifted", "the trainer's labels are shifted by one", "prime-rl #1525", plant.log_probs(_targets), "engine_is_the_trainer"),
    Bug("dropout", "dropout is on in the trainer", "trl #4", plant.wrapped(
        "slime_core.trainers.embedded.trainer.hidden_states", _dropout), "engine_is_the_trainer"),
    Bug("dropout_between_passes", "dropout is on in the update and off in the pass before it", "trl #4", plant.wrapped(
        "slime_core.trainers.embedded.trainer.hidden_states", _dropout), "passes_agree", settings=_OWN),
    Bug("old_log_probs_stale", "old log-probs are an update old", "trlx #107", _old(lambda part: part - 0.3), "ratio_begins_at_one",
        settings=_OWN),
    Bug("old_log_probs_untempered", "old log-probs are of another temperature than new ones", "trl #454", _old(lambda part: 0.8 * part),
        "ratio_begins_at_one", settings=_OWN),
    # -- weights
    Bug("tensor_not_sent", "one tensor is not sent to the engine", "verl #205", plant.sent(
        lambda w, first: _stale(w, first, "layers.0.mlp")), "engine_serves_the_trained", 2),
    Bug("norm_not_sent", "the last norm is not sent to the engine", "", plant.sent(
        lambda w, first: _stale(w, first, "model.norm")), "engine_serves_the_trained", 2),
    Bug("embeddings_not_sent", "tied embeddings are not sent to the engine", "", plant.sent(
        lambda w, first: _stale(w, first, "embed_tokens")), "engine_serves_the_trained", 2),
    Bug("engine_asleep", "the engine keeps the weights that it started with", "trl #5312", plant.sent(_stale), "engine_serves_the_trained", 2),
    Bug("optimizer_of_a_copy", "the optimizer updates a copy of the weights", "accelerate #3209", _keep(), "weights_move", 2),
    Bug("tensor_left_out", "the optimizer leaves a tensor out", "", _keep("q_proj"), "every_tensor_moves", 4),
    Bug("tensor_detached", "a tensor is detached", "", plant.before_steps(_no_gradient), "gradient_of_every_tensor", 3),
    # -- reference
    Bug("reference_follows", "the reference is updated by accident", "dppo #47", plant.wrapped(
        "slime_core.learning.learner.Learner.train", _following), "reference_stays", 3, settings=_KL),
    Bug("reference_untempered", "the reference's log-probs ignore the temperature", "OpenRLHF #853", _reference(lambda p: 0.7 * p),
        "reference_is_the_start", settings=_KL),
    Bug("reference_of_others", "the reference is another model", "", _reference(lambda p: p - 0.5), "reference_is_the_start", settings=_KL),
    # -- the step
    Bug("ratio_detached", "the importance ratio is detached", "", plant.wrapped(
        "slime_core.estimator.token_kl", lambda f, *a: f(*a).detach()), "gradient_there"),
    Bug("kl_negative", "the KL's sign is turned", "", plant.wrapped(
        "slime_core.learning.loss.PolicyLoss._kl", lambda f, *a: -f(*a)), "kl_not_negative", 2, settings=_KL | {"lr": 1e-2}),
    Bug("kl_twice", "the KL's coefficient is applied twice", "", plant.wrapped(
        "slime_core.learning.loss.PolicyLoss._total", _kl_twice), "loss_of_its_terms", 2, settings=_KL | {"lr": 1e-2}),
    Bug("entropy_sign", "the entropy is punished", "omnisafe #133", plant.wrapped(
        "slime_core.learning.loss.PolicyLoss._total", _entropy_sign), "loss_of_its_terms", settings={"entropy_coef": 0.01}),
    Bug("loss_sign", "the policy loss is maximised", "", plant.wrapped(
        "slime_core.estimator.clipped_surrogate", lambda f, *a: (-f(*a)[0], f(*a)[1])), "loss_of_the_batch", settings=_PLAIN),
    Bug("accumulation_averaged", "the mean of micro-batches is divided once more", "ms-swift #10117", _scaled(0.25), "loss_of_the_batch",
        settings=_PLAIN),
    Bug("accumulation_summed", "micro-batches are added up, each with its own mean", "trl #3021", _scaled(4.0), "loss_of_the_batch",
        settings=_PLAIN),
    Bug("padding_in_the_mean", "padding is counted in the mean", "SkyRL #462", _scaled(0.5), "loss_of_the_batch", settings=_PLAIN),
    Bug("lr_scaled", "the learning rate is multiplied by the number of processes", "", _lr(8.0), "learning_rate_as_set"),
    Bug("lr_zero", "the schedule is at its end from the first step on", "SkyRL #873", _lr(0.0), "learning_rate_as_set"),
    Bug("lr_halved", "the schedule counts micro-batches as steps", "starVLA #210", _lr(0.5), "learning_rate_as_set"),
    # -- not caught
    Bug("top_p_in_training", "top-p sampling in training, log-probs of the whole distribution", "verl #6240", plant.nothing, None,
        why="log-probs agree; warned of when the run starts, with `--use-sampling-mask` as the way out", settings={"rollout_top_p": 0.5}),
    Bug("backward_scaled", "gradients are scaled and the loss is not", "ms-swift #10116", plant.wrapped(
        "torch.autograd.backward", _backward), None, why="Adam does not feel it, and the loss that is reported is right"),
    Bug("ratio_upside_down", "old and new log-probs are exchanged", "", plant.wrapped(
        "slime_core.estimator.token_kl", lambda f, new, old: f(old.detach() * 0 + old, new)), None,
        why="at ratio 1 value and gradient norm are those of the right loss"),
)  # fmt: skip
