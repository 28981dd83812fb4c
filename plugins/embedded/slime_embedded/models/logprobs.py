"""Compute log-probs of given tokens, and entropy, with at most a chunk of the [T, V] float32 logits in memory.

Trainers call it with the last hidden states and the output matrix. Rows are processed a chunk at a time, in the forward
and in the backward pass, so peak memory is a few buffers of `chunk * V` floats, independent of T. The backward pass
recomputes the logits, unless a single chunk has all rows and the functions in C leave them unchanged. Matrix products
run in the inputs' dtype; everything after them, and the sum of the weight gradient over chunks, is float32 (float64 for
float64 inputs).

With z = logits / temperature: log p = z[target] - logsumexp(z), entropy H = -sum p log p, and
d log p / dz_j = [j = target] - p_j,  dH / dz_j = -p_j * (log p_j + H). With a `SamplingMask` z is -inf outside each
row's kept tokens: p is the softmax over the kept tokens, and all other tokens have gradient 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 4 * 2**20, "cuda": 32 * 2**20}
"""Default bound on chunk * V, by device type; on a GPU small chunks would starve the matrix units."""
Kernels: TypeAlias = Callable[..., CDLL | None]
"""Return compiled functions that take these tensors, or None: torch computes the same (`slime_embedded.kernels`)."""


@dataclass(frozen=True)
class SamplingMask:
    """The kept set of each of T sampled tokens: the part of the vocabulary that top-k, top-p and min-p kept.

    "Keep Sampling Mask" (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): with K a token's kept set, log p(y) = z_y - log
    sum_{v in K} e^{z_v} for every policy, so that ratios compare distributions over the same actions. The token itself
    always belongs to its set; a row with an empty set keeps the whole vocabulary.
    """

    ids: torch.Tensor
    """Token ids of all sets, row after row, [N] int64."""
    offsets: torch.Tensor
    """Start of each row's ids, [T + 1] int64, on the CPU."""

    def apply_(self, z: torch.Tensor, targets: torch.Tensor, part: slice, first: int = 0) -> torch.Tensor:
        """Write -inf for tokens outside the kept sets, and return `z`.

        Args:
            z: [c, V] logits of the rows `part`, whose columns are the token ids from `first` on.
            targets: [T] the sampled tokens.
            part: The rows of `z`.
            first: Token id of the first column.
        """
        begin, end = (int(self.offsets[row]) for row in (part.start, part.stop))
        counts = self.offsets[part.start : part.stop + 1].diff().to(z.device)
        rows = torch.arange(z.shape[0], device=z.device)
        columns = torch.cat((self.ids[begin:end], targets[part])) - first
        rows = torch.cat((rows.repeat_interleave(counts), rows))
        here = (columns >= 0) & (columns < z.shape[1])
        dropped = (counts > 0)[:, None].repeat(1, z.shape[1])
        dropped[rows[here], columns[here]] = False
        return z.masked_fill_(dropped, -torch.inf)


def token_log_probs(
    hidden: torch.Tensor,
    lm_head_weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    mask: SamplingMask | None = None,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs of `targets` under softmax(hidden @ lm_head_weight.T / temperature).

    Args:
        hidden: [T, H]; float32, float64 or bfloat16.
        lm_head_weight: [V, H]; cast to the dtype of `hidden` if it differs.
        targets: [T] token ids in [0, V).
        temperature: Sampling temperature, > 0.
        chunk_size: Rows per chunk; None (or a number below 1) picks it by `CHUNK_ELEMENTS`.
        with_entropy: Also return the entropy in nats, which is differentiable, too.
        mask: The kept set of each of `targets`; None: the whole vocabulary.
        kernels: Compiled functions, used if they take the tensors; None: torch only.

    Returns:
        log_probs [T] and entropy [T] or None, in float32 (float64 for float64 inputs).

    Raises:
        IndexError: A target is not in [0, V) (RuntimeError if torch computes).
    """
    rows = _chunk_rows(lm_head_weight.shape[0], chunk_size, hidden.device)
    how = _How.of(temperature, rows, with_entropy, mask, kernels)
    log_probs, entropy = _LogProbs.apply(hidden, lm_head_weight.to(hidden.dtype), targets, how)  # type: ignore[no-untyped-call]
    return log_probs, entropy if with_entropy else None


def log_probs_from_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    with_entropy: bool = False,
    mask: SamplingMask | None = None,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute token log-probs from logits [T, V] in any float dtype; the logits are never copied as a whole.

    For backends whose model returns logits.

    Args and returns as for `token_log_probs`; the gradient has the dtype of `logits`.
    """
    rows = _chunk_rows(logits.shape[1], chunk_size, logits.device)
    how = _How.of(temperature, rows, with_entropy, mask, kernels)
    log_probs, entropy = _LogProbs.apply(logits, None, targets, how)  # type: ignore[no-untyped-call]
    return log_probs, entropy if with_entropy else None


class _How(NamedTuple):
    """Hold the settings by which logits become log-probs."""

    temperature: float
    rows: int
    """Number of rows in a chunk."""
    with_entropy: bool
    mask: SamplingMask | None
    kernels: Kernels | None

    @classmethod
    def of(
        cls, temperature: float, rows: int, with_entropy: bool, mask: SamplingMask | None, kernels: Kernels | None
    ) -> _How:
        if not temperature > 0:
            raise ValueError(f"temperature {temperature}: must be greater than 0")
        return cls(temperature, rows, with_entropy, mask, kernels)

    def products(self, rows: torch.Tensor, weight: torch.Tensor) -> CDLL | None:
        """Return the compiled matrix products, if they take these tensors."""
        return None if self.kernels is None else self.kernels(rows, weight, multiplied=True)

    def compiled(self, logits: torch.Tensor, targets: torch.Tensor) -> CDLL | None:
        """Return the compiled functions, if they take these logits and targets."""
        fits = self.mask is None and targets.is_contiguous() and targets.dtype == torch.int64
        library = self.kernels(logits) if fits and self.kernels else None
        if library is not None and not 0 <= targets.min() <= targets.max() < logits.shape[1]:  # C would not look
            raise IndexError(f"targets from {targets.min()} to {targets.max()}; allowed: 0 to {logits.shape[1] - 1}")
        return library

    def z(self, logits: torch.Tensor, targets: torch.Tensor, part: slice) -> torch.Tensor:
        """Turn the [c, V] logits of the rows `part` into the logits of the sampling distribution, in place."""
        z = logits.div_(self.temperature)
        return z if self.mask is None else self.mask.apply_(z, targets, part)


def _chunk_rows(vocab_size: int, chunk_size: int | None, device: torch.device) -> int:
    elements = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])
    return chunk_size if chunk_size and chunk_size > 0 else max(1, elements // max(vocab_size, 1))


def _slices(total: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, total)) for start in range(0, total, rows))


def _pointers(*tensors: torch.Tensor | None) -> list[int | None]:
    """Return the addresses of tensors, as compiled functions take them."""
    return [None if x is None else x.data_ptr() for x in tensors]


def _chunk_logits(
    source: torch.Tensor, weight: torch.Tensor | None, part: slice, dtype: torch.dtype, how: _How
) -> torch.Tensor:
    """Return new logits [c, V]: from hidden states and the output matrix, or a copy of logits if `weight` is None."""
    rows = source[part]
    if weight is None:
        return rows.to(dtype, copy=True)
    library = how.products(rows, weight)
    if library is None:
        return (rows @ weight.T).to(dtype)
    logits = rows.new_empty(len(rows), len(weight))
    library.project(*rows.shape, len(weight), *_pointers(rows, weight, None, logits))
    return logits


def _norm_and_entropy(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logsumexp(z) and H = log S - sum(e * (z - max)) / S, e = exp(z - max), S = sum(e); overwrites z [c, V]."""
    top = z.amax(dim=-1, keepdim=True)
    weights = z.sub_(top).exp()
    total = weights.sum(dim=-1)
    # A logit of -inf has weight 0 and must add 0, not 0 * -inf.
    mean = weights.mul_(z.clamp_(min=torch.finfo(z.dtype).min)).sum(dim=-1) / total
    log_total = total.log()
    return top.squeeze(-1) + log_total, log_total - mean


def _logit_gradient(
    z: torch.Tensor,
    targets: torch.Tensor,
    norm: torch.Tensor,
    entropy: torch.Tensor | None,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient [c, V] with respect to z, which is overwritten; at least one of the gradients is given."""
    log_p = z.sub_(norm[:, None])
    p = log_p.exp()
    if grad_entropy is None:
        assert grad_log_probs is not None
        grad = p.mul_(-grad_log_probs[:, None])
    else:
        assert entropy is not None
        factor = log_p.clamp_(min=torch.finfo(z.dtype).min).add_(entropy[:, None]).mul_(grad_entropy[:, None])
        if grad_log_probs is not None:
            factor.add_(grad_log_probs[:, None])
        grad = p.mul_(factor).neg_()
    if grad_log_probs is not None:
        grad.scatter_add_(-1, targets[:, None], grad_log_probs[:, None])
    return grad


class _LogProbs(torch.autograd.Function):
    """Map (hidden, weight) or (logits, None) to (log_probs, entropy).

    It saves the inputs and [T] numbers, and recomputes the logits in the backward pass, except those of a single chunk
    in C. Without a weight the only [T, V] tensors are the logits and their gradient, in their dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, weight: torch.Tensor | None, targets: torch.Tensor, how: _How
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(source.dtype, torch.float32)
        log_probs = torch.empty(targets.shape[0], dtype=dtype, device=targets.device)
        norms = torch.empty_like(log_probs)
        entropies = torch.empty_like(log_probs) if how.with_entropy else log_probs.new_empty(0)
        ctx.how, ctx.kept = how, []
        with torch.autocast(source.device.type, enabled=False):
            for part in _slices(targets.shape[0], how.rows):
                logits = _chunk_logits(source, weight, part, dtype, how)
                library = how.compiled(logits, targets)
                if library is not None:
                    found = (log_probs[part], norms[part], entropies[part] if how.with_entropy else None)
                    library.log_probs(*_pointers(logits, targets[part], *found), *logits.shape, how.temperature)
                    if weight is not None and any(ctx.needs_input_grad) and len(logits) == len(targets):
                        ctx.kept.append(logits)
                    continue
                z = how.z(logits, targets, part)
                chosen = z.gather(-1, targets[part, None]).squeeze(-1)
                if how.with_entropy:
                    norms[part], entropies[part] = _norm_and_entropy(z)
                else:
                    norms[part] = torch.logsumexp(z, dim=-1)
                log_probs[part] = chosen - norms[part]
        ctx.save_for_backward(source, weight, targets, norms, entropies)
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        (source, weight, targets, norms, entropies), how = ctx.saved_tensors, ctx.how
        if grad_log_probs is None and grad_entropy is None:
            return None, None, None, None
        grad_source = torch.empty_like(source) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=norms.dtype) if ctx.needs_input_grad[1] else None
        with torch.autocast(source.device.type, enabled=False):
            for part in _slices(targets.shape[0], how.rows):
                # Overwritten below, so a second backward pass recomputes them.
                logits = ctx.kept.pop() if ctx.kept else _chunk_logits(source, weight, part, norms.dtype, how)
                library = how.compiled(logits, targets)
                entropy = entropies[part] if how.with_entropy else None
                grads = [None if grad is None else grad[part].contiguous() for grad in (grad_log_probs, grad_entropy)]
                if library is None:
                    z = how.z(logits, targets, part)
                    grad = _logit_gradient(z, targets[part], norms[part], entropy, *grads).div_(how.temperature)
                else:
                    grad, columns = logits, (targets[part], norms[part], entropy, *grads)
                    library.log_probs_backward(*_pointers(grad, *columns), *grad.shape, how.temperature)
                narrow, rows = grad.to(source.dtype), source[part]
                if weight is not None and (library := how.products(rows, weight)):
                    into = (None if grad_source is None else grad_source[part], grad_weight)
                    library.project_backward(*rows.shape, len(weight), *_pointers(rows, weight, narrow, *into))
                    continue
                if grad_source is not None:
                    grad_source[part] = narrow if weight is None else narrow @ weight
                if grad_weight is not None and grad_weight.dtype == narrow.dtype:
                    grad_weight.addmm_(narrow.T, rows)
                elif grad_weight is not None:
                    grad_weight.add_(narrow.T @ rows)
        return grad_source, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def response_log_probs(
    logits: torch.Tensor,
    unconcat_tokens: Sequence[torch.Tensor | Sequence[int]],
    response_lengths: Sequence[int],
    temperature: float = 1.0,
    *,
    with_entropy: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return differentiable log-probs of each response, and the entropies of the distributions over its tokens.

    Args:
        logits: [1, T, V] or [T, V] for the T concatenated tokens of all samples, prompts included.
        unconcat_tokens: [n] token ids of each sample, prompt and response.
        response_lengths: [n] number of response tokens at the end of each sample.
        temperature: `args.rollout_temperature`; the logits are not yet divided by it.
        with_entropy: Also return entropies.

    Returns:
        [n] tensors of [response_length], and as many entropies in nats, or None.

    Raises:
        ValueError: The lengths do not fit the logits, or a response has no prompt token before it.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    tokens = [torch.as_tensor(part, dtype=torch.long, device=logits.device) for part in unconcat_tokens]
    total = sum(len(part) for part in tokens)
    if total != rows.shape[0] or len(tokens) != len(response_lengths):
        raise ValueError(
            f"logits of {rows.shape[0]} tokens, but {len(tokens)} samples with {total} tokens and"
            f" {len(response_lengths)} response lengths"
        )
    wanted, targets, end = [], [], 0
    for part, length in zip(tokens, response_lengths):
        if not 0 <= length < len(part):
            raise ValueError(f"a response of {length} tokens in a sample of {len(part)}: a prompt token is needed")
        end += len(part)
        wanted.append(torch.arange(end - length - 1, end - 1, device=logits.device))
        targets.append(part[len(part) - length :])
    found, entropy = log_probs_from_logits(
        rows[torch.cat(wanted)], torch.cat(targets), temperature, with_entropy=with_entropy
    )
    lengths = list(response_lengths)
    return list(torch.split(found, lengths)), None if entropy is None else list(torch.split(entropy, lengths))
