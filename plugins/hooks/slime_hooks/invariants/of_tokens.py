"""Invariants of masks, versions and log-probs, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from slime_core.sample import TrainBatch
from slime_hooks.invariants.incident import Incident, foreign_tokens
from slime_hooks.invariants.trained import Trained, sums

_MOST = 0.9
_ROWS = 4
_NATS = 0.1
"""Mean distance of trainer and engine that rounding in bfloat16 does not reach."""
_GROWN = 3e-5
"""Growth of their distance in float32 when sharper policies amplify rounding."""
_DRIFT = 1e-3
"""Mean distance of the reference from itself, on one sample, in two packings."""
_FORWARD = 0.02
"""Mean distance of two passes of the trainer, and of both in float32."""


def mask_of_the_sampled(it: Trained) -> Iterator[Incident]:
    """Check that all trained tokens were sampled, from the first sampled token to the last."""
    batch = it.batch
    foreign = ended = unended = begun = unbegun = last = unlast = 0
    for position, mask in enumerate(batch.loss_masks):
        sampled = it.sampled(position)
        foreign += 0 if all(sampled) else sum(m and not s for m, s in zip(mask, sampled))
        if not any(mask) or not sampled or it.withholds:
            continue
        begun += sampled[0]
        unbegun += sampled[0] and not mask[0]
        last += sampled[-1]
        unlast += sampled[-1] and not mask[-1]
        if not batch.truncated[position]:
            ended += sampled[-1]
            unended += sampled[-1] and not mask[-1]
    if foreign and batch.rollout_log_probs is not None:
        yield foreign_tokens(foreign)
    if begun >= _ROWS and unbegun >= _MOST * begun:
        yield Incident(
            "first_token_trains",
            "the first sampled token never trains: the mask is shifted by one, or the prompt is counted a token longer",
            f"{unbegun} of {begun} samples",
        )
    if (ended >= _ROWS and unended >= _MOST * ended) or (last >= _ROWS and unlast >= _MOST * last):
        yield Incident(
            "end_trains",
            "the token that ends an answer never trains: EOS is masked as padding, or the mask is a token short; the"
            " model will not learn to stop",
            f"{unlast} of {last} samples, {unended} of {ended} that ended by themselves",
        )


def versions_known(it: Trained) -> Iterator[Incident]:
    """Check that no token is newer than the weights that it trains."""
    versions = it.batch.token_weight_versions or ()
    newest = max((max(row, default=0) for row in versions), default=0)
    if newest > it.batch.weight_version:
        yield Incident(
            "versions_exist",
            "tokens say that weights wrote them which did not exist yet: versions are counted twice or mispaired",
            f"version {newest}, the newest is {it.batch.weight_version}",
        )


class Gaps:
    """Distance of trainer and engine on tokens of the trained weights, over the rollouts."""

    def __init__(self) -> None:
        self._least: float | None = None
        self._seen = -1
        """The last rollout that was checked."""

    def incidents(self, it: Trained) -> Iterator[Incident]:
        """Check that the distance is due to rounding, and stays so."""
        trained_since_the_push = it.batch.rollout_id % it.args.update_weights_interval
        again, self._seen = it.batch.rollout_id == self._seen, it.batch.rollout_id
        if it.tensors.rollout_log_probs is None or trained_since_the_push or again:
            return
        positions = [position for position in it.known if it.fresh(position)]
        if not positions:
            return
        own, masks = [it.known[p] for p in positions], [it.tensors.loss_masks[p] for p in positions]
        served, mask = torch.cat([it.tensors.rollout_log_probs[p] for p in positions]), torch.cat(masks)
        lengths = [it.local.response_lengths[p] for p in positions]
        gaps, counts = sums((torch.cat(own) - served).abs() * mask, lengths), sums(mask, lengths)
        by_group: dict[int, float] = {}
        for position, gap, count in zip(positions, gaps, counts):
            if count:
                group = it.local.group_indices[position]
                by_group[group] = max(by_group.get(group, 0.0), gap / count)
        if not by_group:
            return
        mean, least = math.fsum(gaps) / math.fsum(counts), self._least
        self._least = mean if least is None else min(mean, least)
        worst = max(by_group, key=by_group.__getitem__)
        numbers = f"{mean:.3g} nats a token in the mean, {by_group[worst]:.3g} in a sample of group {worst}"
        grown = _GROWN if it.args.dtype == "float32" else 1e-3
        if least is not None and mean > 20 * least + grown:
            yield Incident(
                "engine_serves_the_trained",
                "trainer and engine came apart after a weight update: a tensor is not sent, an adapter is not merged,"
                " the engine serves an older version, or a cache of older weights is used",
                f"{numbers}; it was {least:.3g}",
            )
        elif least is None and mean > (_FORWARD if it.args.dtype == "float32" else _NATS):
            yield Incident(
                "engine_is_the_trainer",
                "trainer and engine disagree from the first rollout on: another temperature, top-p, template, tokens or"
                " attention there, log-probs that are shifted, stale, filled up or another request's, labels or"
                " positions that are wrong, or dropout",
                numbers,
            )


class References:
    """Checks that the reference begins as the policy, and does not change."""

    def __init__(self) -> None:
        self._first: tuple[TrainBatch, torch.Tensor] | None = None
        """A short sample of the first rollout seen, with the reference's log-probs at that time."""

    def _drifted(self, it: Trained) -> Iterator[Incident]:
        """Compute the reference's log-probs of the sample again, in rollouts 3, 5, 9, 17, ... since, in one process."""
        reference, local = it.tensors.ref_log_probs, it.local
        if self._first is None:
            lengths = [(len(local.tokens[p]), p) for p in range(len(local)) if local.response_lengths[p] >= _ROWS]
            alone = getattr(it.trainer, "world_size", 1) == 1 and hasattr(it.trainer, "model")  # no part of a model
            if lengths and alone and isinstance(it.trainer.model, torch.nn.Module):
                chosen = min(lengths)[1]
                self._first = local.select([chosen]), reference[chosen].clone()
                self._since = it.batch.rollout_id
            return
        since = it.batch.rollout_id - self._since
        if since < 2 or since & (since - 1):
            return
        batch, first = self._first
        distance = float((it.trainer.log_probs(batch, [[0]], role="ref")[0] - first).abs().mean())
        if distance > (_DRIFT if it.args.dtype == "float32" else _FORWARD):
            yield Incident(
                "reference_is_kept",
                "the reference drifts: it is updated from the policy, or shares tensors with it",
                f"{distance:.3g} nats a token on a sample that it saw {since} rollouts ago",
            )

    def incidents(self, it: Trained, *, moved: bool) -> Iterator[Incident]:
        """Yield incidents of a reference that differs or changes."""
        reference, args = it.tensors.ref_log_probs, it.args
        if reference is None or args.ref_update_interval:
            return
        yield from self._drifted(it)
        known = [p for p, own in it.known.items() if own.shape == reference[p].shape]
        if not known:
            return
        own = torch.cat([it.known[p] for p in known])
        distance = (own - torch.cat([reference[p] for p in known])).abs()
        starts = it.batch.rollout_id == 0 and not args.load and args.ref_load in (None, args.hf_checkpoint)
        if starts and float(distance.mean()) > _FORWARD:
            yield Incident(
                "reference_is_the_start",
                "the reference is not the model that training starts from: other weights, temperature or tokens, or"
                " dropout",
                f"{float(distance.mean()):.3g} nats a token before the first step",
            )
        if moved and it.batch.rollout_id > 1 and float(distance.max()) == 0.0:
            yield Incident(
                "reference_stays",
                "the reference follows the policy: it shares its tensors or is updated, so the KL term is 0",
                f"equal on {len(own)} tokens after {it.batch.rollout_id} rollouts",
            )
