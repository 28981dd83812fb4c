"""The code with a bug, in place of the code without: each is called with the original function first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from statistics import fmean
from typing import Any

import torch
from slime_embedded.models.lora_linear import base_weights

# -- rewards and groups: (rewards, groups) -> shaped


def by_group(formula: Callable[..., float]) -> Callable[..., list[float]]:
    """`formula(own, x, all)`: the group's rewards, one of them, and the whole batch's."""

    def shaped(original: Any, rewards: list[float], groups: list[int], *rest: Any) -> list[float]:
        members = {group: [r for r, g in zip(rewards, groups) if g == group] for group in groups}
        return [formula(members[group], x, rewards) for x, group in zip(rewards, groups)]

    return shaped


def without_siblings(original: Any, rewards: Any, groups: Any, std: bool, rollout_ids: Any) -> Any:
    """Each part of a rollout that was split counts as a rollout."""
    return original(rewards, groups, std)


def one_group_if_uneven(original: Any, rewards: Any, groups: Any, *rest: Any) -> Any:
    """Groups are found by reshaping, and rewards that do not fit the shape are one group."""
    even = len({list(groups).count(group) for group in groups}) == 1
    return original(rewards, groups if even else [0] * len(groups), *rest)


def by_stride(original: Any, rewards: Any, groups: Any, *rest: Any) -> Any:
    """Groups are found by counting to their size, and what is left over is centred by 0 and divided by 0 + 1e-6."""
    size = max(map(list(groups).count, groups))
    whole = len(rewards) // size * size
    return original(rewards[:whole], [place // size for place in range(whole)], rest[0]) + [
        r / 1e-6 for r in rewards[whole:]
    ]


def counted_though_removed(original: Any, *given: Any) -> Any:
    """A row that is not trained on stays in its group's statistics."""
    row = original(*given)
    row.removed = False
    return row


def rewards_stay_behind(original: Any, batch: Any, indices: Any) -> Any:
    """Rows are reordered, rewards are not."""
    found = original(batch, indices)
    found.rewards = batch.rewards[: len(found.rewards)]
    return found


def advantages(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Callable[..., Any]:
    """Of what the estimator gives: lists of [response_length]."""
    return lambda original, *args: replace(found := original(*args), advantages=change(found.advantages))


def broadcast(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """[n] times [n, 1] is [n, n], whose mean over the rows is the same for all."""
    mean = fmean(float(part[0]) for part in parts)
    return [torch.full_like(part, mean) for part in parts]


def whitened(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Normalised once more, over all tokens."""
    flat = torch.cat(parts)
    return [(part - flat.mean()) / flat.std() for part in parts]


def scored_though_failed(original: Any, sample: Any, *reason: Any) -> None:
    """A sample that failed has reward 0."""
    original(sample, *reason)
    sample.reward = 0.0


def numbered_across(original: Any, source: Any, prompt: Any) -> Any:
    """A group is one sample of each prompt."""
    group = original(source, prompt)
    first = group[0].group_index // len(group) * len(group)
    for place, sample in enumerate(group):
        sample.group_index = first + place
    return group


def label_of_the_row_before(original: Any, source: Any, prompt: Any) -> Any:
    """Rows are shuffled, and the column that says which is which is not."""
    own, prompt.label = prompt.label, getattr(source, "label_before", prompt.label)
    source.label_before = own
    return original(source, prompt)


def text_of_the_request_before(original: Any, core: Any, sequence: Any) -> str:
    """Texts and requests are paired in another order."""
    own, before = original(core, sequence), vars(core).get("text_before")
    core.text_before = own
    return own if before is None else str(before)


# -- tokens


def mask(change: Callable[[Any, list[int]], list[int]]) -> Callable[..., Any]:
    """`change(row, mask)`: how a row's loss mask is made."""

    def row_of(original: Any, *given: Any) -> Any:
        row = original(*given)
        row.loss_mask = change(row, row.loss_mask)
        return row

    return row_of


def padding_masked(row: Any, own: list[int]) -> list[int]:
    """The end token is the padding token, and padding does not train."""
    return [m * (token < 200) for m, token in zip(own, row.tokens[-len(own) :])]


def start_twice(original: Any, *args: Any, **kwargs: Any) -> tuple[list[int], None]:
    """The tokenizer's start token before the template's."""
    ids, _ = original(*args, **kwargs)
    return [ids[0], *ids], None


def tokens_of_the_text(original: Any, sample: Any, args: Any, tokens: list[int], *rest: Any, **kwargs: Any) -> None:
    """The answer is rendered again, and what its text is in tokens now is trained on."""
    text = kwargs.get("text") or rest[-1]
    ids = [8 + ord(character) % 256 for character in text]
    again = [new if new is not None else old for old, new in zip_longest(tokens, ids[: len(tokens)])]
    original(sample, args, again, *rest, **kwargs)


# -- log-probs


def appended(change: Callable[[list[float]], list[float]]) -> Callable[..., None]:
    """How log-probs are read out of the engine's answer."""

    def append(original: Any, sample: Any, args: Any, tokens: Any, log_probs: Any, *rest: Any, **kwargs: Any) -> None:
        original(sample, args, tokens, change(list(log_probs)), *rest, **kwargs)

    return append


def of_the_next_request(original: Any, core: Any, sequences: Any, tokens: Any, log_probs: Any) -> None:
    """Tokens are put back in the order of the requests, log-probs are not."""
    original(core, sequences, tokens, [*log_probs[1:], log_probs[0]])


def at_temperature_one(original: Any, sampling: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine reports log-probs from before the temperature."""
    raw = logits.float().log_softmax(-1)
    tokens, _ = original(sampling, logits)
    return tokens, raw.gather(1, tokens[:, None]).squeeze(1)


def temperature(change: Callable[[float], float], when: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """Of the trainer's log-probs."""

    def scored(original: Any, *args: Any, **kwargs: Any) -> Any:
        own = kwargs["temperature"]
        return original(*args, **kwargs | {"temperature": change(own) if when() else own})

    return scored


def labels_shifted(original: Any, hidden: Any, head: Any, targets: Any, **kwargs: Any) -> Any:
    """Labels are one token off."""
    return original(hidden, head, targets.roll(1), **kwargs)


def positions_shifted(original: Any, config: Any, positions: torch.Tensor, *rest: Any) -> Any:
    """0, 0, 1, 2, ...: positions are shifted together with the inputs."""
    return original(config, (positions - 1).clamp(min=0), *rest)


def as_one_sequence(when: Callable[[], bool]) -> Callable[..., Any]:
    """Where packed samples begin and end does not reach the attention."""

    def hidden(original: Any, model: Any, token_ids: Any, lengths: Any, **kwargs: Any) -> Any:
        return original(model, token_ids, [sum(lengths)] if when() else lengths, **kwargs)

    return hidden


def dropped(when: Callable[[], bool]) -> Callable[..., torch.Tensor]:
    """Dropout on the hidden states."""

    def hidden(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.nn.functional.dropout(original(*args, **kwargs), 0.3, training=when())

    return hidden


# -- weights


def not_written(*parts: str) -> Callable[..., None]:
    """The engine skips tensors of other names than it knows, once it serves."""

    def update(original: Any, fused: Any, weights: Any, origin: str) -> None:
        given = dict(weights)
        if origin.startswith("update"):
            old = {name: tensor.clone() for name, tensor in fused.named()}
            given |= {name: old[name] for name in given if any(part in name for part in parts)}
        original(fused, given.items(), origin)

    return update


def only_the_number(original: Any, core: Any, weights: Any, version: int, origin: str) -> None:
    """Weights that come are dropped."""
    if version < 2:
        original(core, weights, version, origin)
    else:
        list(weights)
        core.set_version(version)


def base_only(original: Any, model: Any, *rest: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter is not merged into what is sent."""
    return iter(base_weights(model).items())


def of_a_copy(original: Any, optimizer: Any, parameters: Any, *rest: Any) -> None:
    """The optimizer holds other tensors than the model."""
    given = list(parameters)
    original(optimizer, given, *rest)
    for _, parameter in given:
        parameter.data = parameter.data.clone()


def without_queries(original: Any, *args: Any) -> list[Any]:
    """A parameter that is to be trained is in none of the optimizer's groups."""
    return [(name, parameter) for name, parameter in original(*args) if "q_proj" not in name]


def detached(original: Any, x: torch.Tensor, *rope: Any) -> torch.Tensor:
    """No gradient reaches queries and keys."""
    rotated: torch.Tensor = original(x.detach(), *rope)
    return rotated


# -- the reference


def reference_follows(original: Any, learner: Any, *args: Any) -> Any:
    """The reference is given the trained weights."""
    found = original(learner, *args)
    learner.trainer.update_reference()
    return found


def another_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Weights of another checkpoint."""
    model = original(*args, **kwargs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


class OfTheReference:
    """True while the reference's log-probs are computed."""

    def __init__(self) -> None:
        self._now = False

    def __call__(self) -> bool:
        """Whether they are."""
        return self._now

    def watch(self, original: Any, *args: Any, role: str = "actor") -> Any:
        """Around the trainer's `log_probs`."""
        self._now = role == "ref"
        try:
            return original(*args, role=role)
        finally:
            self._now = False


# -- the step


def total(change: Callable[[Any, Any, dict[str, torch.Tensor]], Any]) -> Callable[..., Any]:
    """`change(args, loss, terms)`: how the loss is put together."""

    def summed(original: Any, loss_of: Any, *args: Any) -> Any:
        loss, terms = original(loss_of, *args)
        turned = loss + change(loss_of.args, loss, terms)
        return turned, terms | {"loss": turned.detach()}

    return summed


def own_mean(original: Any, step: Any, batch: Any, positions: Any, own: torch.Tensor) -> Any:
    """Each micro-batch has a mean of its own, and the means are added up."""
    rollouts = len({batch.rollout_ids[p] for p in positions})
    return original(replace(step, num_rollouts=rollouts, num_tokens=int(own.sum())), batch, positions, own)


def mean_of_means(original: Any, step: Any, batch: Any, positions: Any, own: torch.Tensor) -> Any:
    """What is a mean over the step already is divided by the number of micro-batches."""
    return original(step, batch, positions, own) * len(positions) / len(step.positions)


def over_padding(original: Any, step: Any, batch: Any, positions: Any, own: torch.Tensor) -> Any:
    """The mean is over rows as long as the longest one."""
    tokens = len(step.positions) * max(batch.response_lengths)
    return original(replace(step, num_tokens=tokens), batch, positions, own)


def over_masked(original: Any, step: Any, batch: Any, positions: Any, own: torch.Tensor) -> Any:
    """Tokens that the mask leaves out are counted."""
    return original(replace(step, num_tokens=sum(batch.response_lengths)), batch, positions, own)


def cleared_before_each(original: Any, trainer: Any, *args: Any) -> Any:
    """Gradients are cleared before each micro-batch, so that the last one's are left."""
    trainer.optimizer.zero_grad()
    return original(trainer, *args)


def last_not_run(original: Any, trainer: Any, batch: Any, micro_batches: Any, *rest: Any, **kwargs: Any) -> Any:
    """The loop over micro-batches ends one too early."""
    return original(trainer, batch, [*micro_batches][:-1] or micro_batches, *rest, **kwargs)


class Backward:
    """Around a step and `torch.autograd.backward`: `change(call, loss, number, step)`, which may call `call(loss)`."""

    def __init__(self, change: Callable[[Any, torch.Tensor, int, Any], None]) -> None:
        self._change, self._number, self._step = change, 0, ()

    def step(self, original: Any, trainer: Any, batch: Any, micro_batches: Any, *rest: Any, **kwargs: Any) -> Any:
        """Around the trainer's `train_step`."""
        self._number, self._step = 0, (trainer, batch, [*micro_batches])
        return original(trainer, batch, micro_batches, *rest, **kwargs)

    def backward(self, original: Any, loss: torch.Tensor) -> None:
        """Around one backward pass."""
        self._number += 1
        self._change(original, loss, self._number, self._step)


def skipping_the_last(call: Any, loss: torch.Tensor, number: int, step: Any) -> None:
    """The last micro-batch's loss is reported, and nothing is propagated from it."""
    if number < len(step[2]):
        call(loss)


def losing_the_last(call: Any, loss: torch.Tensor, number: int, step: Any) -> None:
    """The last micro-batch's gradient is computed, and does not reach the optimizer."""
    kept = step[0].optimizer.grads.clone()
    call(loss)
    if number == len(step[2]) > 1:
        step[0].optimizer.grads.copy_(kept)


def each_with_its_mean(call: Any, loss: torch.Tensor, number: int, step: Any) -> None:
    """Micro-batches of uneven sizes are averaged as if they were even."""
    parts = step[2]
    call(loss * sum(map(len, parts)) / len(parts[number - 1]) / len(parts))


def rate_of_the_optimizer(change: Callable[[Any, float], float]) -> Callable[..., None]:
    """`change(optimizer, lr)`: what the optimizer uses, while the schedule's is reported."""

    def update(original: Any, optimizer: Any, flats: Any, step: Any, lr: float, *rest: Any) -> None:
        original(optimizer, flats, step, change(optimizer, lr), *rest)

    return update


def without_bias_correction(original: Any, optimizer: Any, flats: Any, step: Any, lr: float, *rest: Any) -> None:
    """The number of steps that the moments have seen is never told to the optimizer: it takes it for large."""
    own = step.clone()
    step.fill_(100_000)
    original(optimizer, flats, step, lr, *rest)
    step.copy_(own + 1)


def reference_drifts(original: Any, learner: Any, *args: Any) -> Any:
    """The reference is a moving average of the policy."""
    found = original(learner, *args)
    trainer = learner.trainer
    own = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, parameter in trainer._frozen["ref"].named_parameters():
            parameter.lerp_(own[name], 0.1)
    return found


def groups_shuffled(original: Any, *args: Any) -> list[int]:
    """Samples are shuffled between their rewards and their groups."""
    found = original(*args)
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    return [found[place] for place in order]


def digits_exchanged(original: Any, core: Any, sequence: Any) -> str:
    """Another tokenizer, which has two tokens the other way round, makes the text."""
    return str(original(core, sequence)).translate(str.maketrans("17eo", "71oe"))


def clipped_reward(original: Any, *args: Any) -> float:
    """Rewards are clipped on their way into the batch."""
    return float(min(original(*args), 0.1))


def bounds_exchanged(original: Any, kl: Any, advantages: Any, low: float, high: float | None, *rest: Any) -> Any:
    """The lower bound of the clipping is used as the upper one, and the reverse."""
    return original(kl, advantages, low if high is None else high, low, *rest)


def one_seed_a_group(original: Any, seed: int, evaluation: bool, index: int) -> int:
    """The seed is a hash of the group's number."""
    return int(original(seed, evaluation, index // 4))


class EveryThird:
    """True in every third call."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self) -> bool:
        """Whether this one is."""
        self._calls += 1
        return self._calls % 3 == 0


def as_at_first(part: str) -> Callable[..., Iterator[tuple[str, torch.Tensor]]]:
    """A tensor is kept when it is first handed out, and handed out so again."""
    first: dict[str, torch.Tensor] = {}

    def handed(original: Any, *args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in original(*args):
            yield name, first.setdefault(name, tensor.detach().clone()) if part in name else tensor

    return handed
