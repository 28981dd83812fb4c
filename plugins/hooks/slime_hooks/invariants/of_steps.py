"""Invariants of optimizer steps: ratio, loss, gradients and learning rate."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping

import torch

from slime_core import Args
from slime_hooks.invariants.incident import Incident
from slime_hooks.invariants.trained import Trained, sums

_BY_TOKEN = ("grpo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_SURROGATE = ("grpo", "gspo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_RATIO = 0.01
_PATIENCE = 3
_RARE = ("expert", "router", "visual", "vision", "embed", "lm_head")
"""Parts of names of tensors that some rollouts do not reach, entirely or in some of their elements."""
_LOOKED_AT = 256


def ratio_one(it: Trained) -> Iterator[Incident]:
    """Check that the first step's policy equals the old policy: no distance, and nothing to clip."""
    if not it.plain:
        return
    first = it.steps[0]
    kl, clipped = first.metrics.get("ppo_kl", 0.0), first.metrics.get("pg_clipfrac", 0.0)
    if abs(kl) > _RATIO or clipped > _RATIO:
        yield Incident(
            "ratio_begins_at_one",
            "the first step's ratio is not 1: old log-probs are stale, of another temperature or of other tokens,"
            " dropout is on, or the clipping is on the wrong side",
            f"old minus new log-prob {kl:.3g}, clipped {clipped:.2%}",
        )
    old = it.tensors.old_log_probs
    parts = [(old[p], new, it.tensors.loss_masks[p]) for p, new in first.log_probs.items() if old and len(old[p])]
    if parts:
        before, now, mask = map(torch.cat, zip(*parts))
        distance = float(((before - now).abs() * mask).sum() / mask.sum().clamp(min=1))
        if distance > _RATIO:
            yield Incident(
                "passes_agree",
                "two passes of the trainer over the same tokens disagree: dropout is on, or they differ in"
                " temperature, padding, attention or positions",
                f"{distance:.3g} nats a token",
            )


def loss_of_its_terms(it: Trained) -> Iterator[Incident]:
    """Check that the loss is policy loss - coefficient * entropy + coefficient * KL, and entropy and KL are >= 0."""
    args = it.args
    if args.loss_type != "policy_loss":
        return
    for step in it.steps:
        m = step.metrics
        if "loss" not in m or "pg_loss" not in m:
            return
        kl, entropy = m.get("kl_loss", 0.0), m.get("entropy_loss", 0.0)
        expected = m["pg_loss"] - args.entropy_coef * entropy + args.kl_loss_coef * kl * bool(args.use_kl_loss)
        if abs(m["loss"] - expected) > 1e-4 * (1 + abs(expected)):
            yield Incident(
                "loss_of_its_terms",
                "the loss is not the sum of its terms: KL or entropy has the wrong sign or factor",
                f"{m['loss']:.6g}, where its terms give {expected:.6g}",
            )
        if kl < -1e-4 and args.kl_loss_type in ("low_var_kl", "k2", "k3") and not args.use_unbiased_kl:
            yield Incident("kl_not_negative", "the KL has the wrong sign or direction", f"{kl:.4g} nats")
        if entropy < -1e-4:
            yield Incident("entropy_not_negative", "the entropy has the wrong sign", f"{entropy:.4g} nats")


def loss_of_the_batch(it: Trained) -> Iterator[Incident]:
    """Check that at ratio 1 the first step's policy loss is minus the mean advantage, by the batch's denominators."""
    args, local, first = it.args, it.local, it.steps[0]
    alone = getattr(it.trainer, "world_size", 1) == 1
    if not it.plain or not alone or args.advantage_estimator not in _SURROGATE or "pg_loss" not in first.metrics:
        return
    masks = [it.tensors.loss_masks[p] for p in first.log_probs]
    if not masks:
        return
    lengths = [local.response_lengths[p] for p in first.log_probs]
    mask, advantages = torch.cat(masks), torch.cat([it.tensors.advantages[p] for p in first.log_probs])
    by_token = args.calculate_per_token_loss
    shares = [1.0 if by_token else 1.0 / max(local.rollout_mask_sums[p], 1) for p in first.log_probs]
    count = int(mask.sum()) if by_token else len({local.rollout_ids[p] for p in first.log_probs})
    expected, size = (
        math.fsum(s * share for s, share in zip(sums(values * mask, lengths), shares)) / max(count, 1)
        for values in (-advantages, advantages.abs())
    )
    if abs(first.metrics["pg_loss"] - expected) > 1e-4 + 0.01 * size:
        yield Incident(
            "loss_of_the_batch",
            "the policy loss is not minus the mean advantage at ratio 1: the mean is over other tokens (padding,"
            " prompt, tokens that are masked, micro-batches each for itself), a factor is missing, or the sign is"
            " turned",
            f"{first.metrics['pg_loss']:.5g}, where the advantages give {expected:.5g}",
        )


def gradient_of_the_loss(it: Trained) -> Iterator[Incident]:
    """Compare each step's gradient by its log-probs with that of the clipped surrogate and KL, recomputed here."""
    args, local = it.args, it.local
    alone = getattr(it.trainer, "world_size", 1) == 1
    known = args.kl_loss_type in ("k1", "k2", "k3", "low_var_kl") and not args.use_unbiased_kl
    if not it.plain or not alone or args.advantage_estimator not in _BY_TOKEN or (args.use_kl_loss and not known):
        return
    for number, step in enumerate(it.steps):
        positions = [p for p in step.log_probs if local.response_lengths[p]]
        old = it.tensors.old_log_probs
        if (
            not step.log_prob_grads
            or not positions
            or (number and (not old or any(not len(old[p]) for p in positions)))
        ):
            return
        masks, new = [it.tensors.loss_masks[p] for p in positions], [step.log_probs[p] for p in positions]
        before = [old[p] if old and len(old[p]) else new[i] for i, p in enumerate(positions)]
        by_token = args.calculate_per_token_loss
        shares = [1.0 if by_token else 1.0 / max(local.rollout_mask_sums[p], 1) for p in positions]
        count = sum(int(mask.sum()) for mask in masks) if by_token else len({local.rollout_ids[p] for p in positions})
        weights = torch.cat([mask * share for mask, share in zip(masks, shares)]) / max(count, 1)
        advantages, log_probs = torch.cat([it.tensors.advantages[p] for p in positions]), torch.cat(new)
        expected = _by_log_prob(args, advantages, log_probs - torch.cat(before)) * weights
        if args.use_kl_loss:
            reference = torch.cat([it.tensors.ref_log_probs[p] for p in positions])
            expected += args.kl_loss_coef * _kl_by_log_prob(args.kl_loss_type, log_probs - reference) * weights
        found = torch.cat([step.log_prob_grads.get(p, torch.zeros_like(n)) for p, n in zip(positions, new)])
        size, off = float(expected.abs().sum()), float((found - expected).abs().sum())
        if off > 0.02 * size + 1e-7:
            along = float((found * expected).sum()) / max(float(expected.square().sum()), 1e-30)
            yield Incident(
                "gradient_of_the_loss",
                "the gradient that is propagated is not that of the loss that is reported: a micro-batch's is lost,"
                " each has a mean of its own, it is scaled, or the clipping is on the wrong side",
                f"step {number}: {off / max(size, 1e-30):.1%} of it differs; it is {along:.3g} times the right one",
            )
            return


def _by_log_prob(args: Args, advantages: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """Return [T] derivatives of PPO's clipped surrogate (Schulman et al., 2017) by the log-prob, dual clip included."""
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
    clipped = torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - args.eps_clip)
    if args.eps_clip_c is not None:
        clipped = clipped | ((advantages < 0) & (ratio > args.eps_clip_c))
    return torch.where(clipped, 0.0, -ratio * advantages)


def _kl_by_log_prob(kind: str, r: torch.Tensor) -> torch.Tensor:
    """Return the [T] derivative of a KL estimate (Schulman, 2020) by the policy's log-prob, r = log p - log p_ref."""
    if kind == "k1":
        return torch.ones_like(r)
    if kind == "k2":
        return r
    slope = 1 - (-r).clamp(max=80.0).exp()
    return torch.where((r - slope).abs() > 10.0, 0.0, slope) if kind == "low_var_kl" else slope


def learning_rate(it: Trained) -> Iterator[Incident]:
    """Check that the rate is the setting's without a schedule, and that a schedule does not end before the run."""
    args = it.args
    rates = [step.metrics["lr"] for step in it.steps if "lr" in step.metrics]
    warms = args.lr_warmup_iters or args.lr_warmup_fraction
    constant = args.lr_decay_style == "constant" and not warms
    to_the_end = args.lr_decay_style in ("linear", "cosine") and args.lr_decay_iters is None and not warms
    over = to_the_end and it.batch.rollout_id + 1 < (args.num_rollout or 0)
    for rate in rates:
        early = over and rate <= args.min_lr < args.lr
        if rate > args.lr * 1.001 or early or (constant and abs(rate - args.lr) > 1e-3 * args.lr):
            yield Incident(
                "learning_rate_as_set",
                "the learning rate is not that of --lr: the schedule is of another length or unit, or scaled twice",
                f"{rate:.4g}, --lr {args.lr:.4g}",
            )
            return


def _handed_out(it: Trained, named: Mapping[str, torch.nn.Parameter]) -> Iterator[Incident]:
    """Check that engines receive every trained parameter; for models without adapters, in one process."""
    if it.args.lora_rank or getattr(it.trainer, "world_size", 1) != 1:
        return
    sent = {tensor.data_ptr() for _, tensor in it.trainer.named_weights()}
    missing = [name for name, p in named.items() if p.data_ptr() not in sent] if sent else []
    if missing and len(missing) < len(named):
        yield Incident(
            "every_tensor_is_sent",
            "a tensor is trained that the trainer never hands out for the engine",
            f"{', '.join(missing[:4])}: {len(missing)} of {len(named)}",
        )


class Weights:
    """The tensors that had a gradient, or moved, over the rollouts; for trainers whose model is a torch module.

    Tensors that FSDP2 shards are not looked at: their norms are collective calls, and a rank may hold none of them. Nor
    are several adapters: a rollout may have no sample of one.
    """

    def __init__(self) -> None:
        self._before: dict[str, torch.Tensor] = {}
        self._still: dict[str, int] = {}
        self._without: dict[str, int] = {}

    def incidents(self, it: Trained) -> Generator[Incident, None, bool]:
        """Yield tensors without gradient or movement; return whether any tensor moved since the last rollout."""
        model = getattr(it.trainer, "model", None)
        stepped = [s for s in it.steps if not s.metrics.get("skipped_steps") and s.metrics.get("lr")]
        if not isinstance(model, torch.nn.Module) or not stepped or it.args.lora_adapters:
            return False
        whole = ((name, p) for name, p in model.named_parameters() if not hasattr(p, "full_tensor"))
        named = {name: p for name, p in whole if p.requires_grad and p.grad is not None}
        grads = [p.grad for p in named.values() if p.grad is not None]
        norms = list(torch._foreach_norm(grads, math.inf)) if grads else []
        some = any(s.metrics.get("grad_norm", 0.0) > 0 for s in stepped)
        if not self._before:
            yield from _handed_out(it, named)
        for name, norm in zip(named, torch.stack(norms).tolist() if norms else ()):
            self._without[name] = self._without.get(name, 0) + 1 if norm == 0.0 else 0
        parts = [p.detach().reshape(-1)[:_LOOKED_AT] for p in named.values()]
        now = dict(zip(named, torch.split(torch.cat(parts), [len(part) for part in parts]) if parts else ()))
        still = self._still_of(now)
        for name in now:
            self._still[name] = self._still.get(name, 0) + 1 if name in still else 0
        known, self._before = bool(self._before), now
        yield from self._found(it, some=some, all_still=known and len(still) == len(now))
        return known and len(still) < len(now)

    def _still_of(self, now: dict[str, torch.Tensor]) -> set[str]:
        """Return the names of the tensors that are as they were; equal names need one comparison."""
        before, lengths = self._before, [len(part) for part in now.values()]
        if not now or [(name, len(part)) for name, part in before.items()] != list(zip(now, lengths)):
            return {name for name, part in now.items() if name in before and torch.equal(part, before[name])}
        changed = torch.cat([*now.values()]) != torch.cat([*before.values()])
        return {name for name, count in zip(now, sums(changed, lengths)) if not count}

    def _found(self, it: Trained, *, some: bool, all_still: bool) -> Iterator[Incident]:
        carrying = it.tensors.advantages is not None and it.carries
        if carrying and not some and it.args.loss_type == "policy_loss" and it.plain:
            yield Incident(
                "gradient_there",
                "samples have advantages and the gradient is 0: log-probs or the ratio are detached, all is clipped or"
                " masked in the loss",
                f"{len(it.steps)} steps with gradient norm 0",
            )
        if some and all_still:
            yield Incident(
                "weights_move",
                "there is a gradient and no weight moves: the optimizer holds other tensors, or the learning rate is"
                " too small for the weights' precision",
                f"{len(self._before)} tensors as they were a rollout ago",
            )
        for counts, check, cause in (
            (self._without, "gradient_of_every_tensor", "a trained tensor never gets a gradient: it is detached"),
            (self._still, "every_tensor_moves", "a trained tensor never moves: the optimizer leaves it out"),
        ):
            rare = [n for n, times in counts.items() if times >= _PATIENCE and not any(part in n for part in _RARE)]
            if some and rare and not all_still:
                yield Incident(check, cause, f"{', '.join(rare[:4])}, {_PATIENCE} rollouts")
