"""Rows with answers -> COMPLETED samples whose loss mask covers exactly what the assistant wrote.

`generate_rollout` is the rollout function `sft` (kind `rollouts`): no engine and no reward take part. Three row forms:
chat messages that end with the assistant, a prompt (`--input-key`) with its answer (`--label-key`), or what `slime
samples filter` wrote: tokens that a policy sampled. A conversation becomes ids piece by piece, because that is how its
pieces meet at inference: ids of the prompt, then sampled ids, then ids of what follows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from slime_commands.sft.demonstrations import Piece, conversation_pieces, end_of_turn
from slime_commands.sft.mask_types import apply_type
from slime_commands.sft.sampled_rows import SampledRow
from slime_core.data.rows import is_conversation
from slime_core.data.tokenizer import encode_rendered, load_tokenizer, quoted_messages
from slime_core.data.tools import prompt_tools
from slime_core.errors import ConfigError, DataError, rollout_name
from slime_core.protocols import Args, RolloutTraits, declares
from slime_core.sample import RolloutFnTrainOutput, Sample, SampleStatus, provenance
from slime_core.sample.provenance import Source, Span, joined

logger = logging.getLogger(__name__)


@declares(RolloutTraits(needs_engine=False, leaves_out=False))  # it trains on every group it draws
def generate_rollout(args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """`rollout_batch_size` supervised samples, one per row.

    Raises:
        DataError: A row has no answer, or its answer cannot be told from the template's text.
        ConfigError: `--n-samples-per-prompt` is not 1, or evaluation is asked of this function.
    """
    if evaluation:
        raise ConfigError("the rollout function 'sft' generates nothing to evaluate; set --eval-function-path")
    if args.n_samples_per_prompt != 1:
        raise ConfigError(f"--n-samples-per-prompt {args.n_samples_per_prompt}: supervised rows have one answer; set 1")
    tokenizer = getattr(data_source, "tokenizer", None) or _tokenizer(str(args.hf_checkpoint))
    groups = data_source.get_samples(args.rollout_batch_size)
    by_text = sum(not fill_supervised(sample, tokenizer, args) for group in groups for sample in group)
    if by_text:
        logger.warning(
            "%s: %d of %d rows were sampled with another vocabulary; trained by their text, encoded again",
            *(rollout_name(rollout_id), by_text, sum(map(len, groups))),
        )
    return RolloutFnTrainOutput(samples=groups)


@functools.lru_cache(maxsize=1)
def _tokenizer(directory: str) -> Any:
    return load_tokenizer(directory)


def fill_supervised(sample: Sample, tokenizer: Any, args: Args) -> bool:
    """Turn prompt and answer into tokens, spans, response and loss mask; it is then COMPLETED with reward 0.

    Args:
        sample: A row's, as the data source reads it; changed in place.
        tokenizer: HF tokenizer.
        args: Read for `loss_mask_type`, `apply_chat_template` and the run's tools.

    Returns:
        Whether the tokens are the row's own where it has some; False: they were another tokenizer's.

    Raises:
        DataError: See `generate_rollout`; the message names the row.
    """
    try:
        row = SampledRow.of(sample)
        exact = row is None or row.fits(tokenizer)
        if row is None:
            pieces = _pieces(sample, tokenizer, args)
        elif exact:
            pieces = row.pieces()
        else:
            pieces = _pieces_by_text(row, sample, tokenizer, args)
        _fill(sample, pieces, tokenizer)
    except DataError as error:
        place = f"{sample.metadata.get('source_name')}, row {sample.metadata.get('source_index')} (from 0)"
        raise DataError(f"{place}: {error}") from error
    sample.reward = 0.0
    sample.status = SampleStatus.COMPLETED
    return exact


def _pieces(sample: Sample, tokenizer: Any, args: Args) -> list[Piece]:
    if is_conversation(sample.prompt):
        assert not isinstance(sample.prompt, str)
        return _conversation(sample, sample.prompt, tokenizer, args)
    if not isinstance(sample.label, str) or not sample.label:
        raise DataError(
            "no answer to learn: the messages must end with the assistant's, or --label-key must name a text column"
        )
    return _answered(sample, sample.label, tokenizer, args)


def _pieces_by_text(row: SampledRow, sample: Sample, tokenizer: Any, args: Args) -> list[Piece]:
    text = row.text()
    if isinstance(sample.prompt, str):
        return _answered(sample, text, tokenizer, args)
    return _conversation(sample, [*sample.prompt, {"role": "assistant", "content": text}], tokenizer, args)


def _conversation(sample: Sample, messages: Sequence[dict[str, Any]], tokenizer: Any, args: Args) -> list[Piece]:
    tools, kwargs = prompt_tools(args, sample.metadata), sample.apply_chat_template_kwargs
    messages = [dict(message) for message in quoted_messages(tokenizer, messages, args, sample.metadata)]
    pieces = conversation_pieces(tokenizer, messages, tools, kwargs)
    return apply_type(args.loss_mask_type, tokenizer, messages, pieces, tools, kwargs)


def _answered(sample: Sample, answer: str, tokenizer: Any, args: Args) -> list[Piece]:
    """The prompt as the data source spelled it, and the answer with what ends it."""
    spans = sample.known_spans()
    starts = [provenance.num_tokens(spans[:i]) for i in range(len(spans))]
    prompt = [Piece(sample.tokens[at : at + s.length], s.source, s.withheld) for at, s in zip(starts, spans)]
    templated = not isinstance(sample.prompt, str) or args.apply_chat_template
    end = end_of_turn(tokenizer, sample.apply_chat_template_kwargs) if templated else ""
    text = answer + (end or tokenizer.eos_token or "")
    return [*prompt, Piece(encode_rendered(tokenizer, text), Source.DEMONSTRATION, text=text)]


def _fill(sample: Sample, pieces: Sequence[Piece], tokenizer: Any) -> None:
    """The prompt is everything before the first trained token; what follows the last one is left out."""
    trained = [number for number, piece in enumerate(pieces) if piece.trained and piece.ids]
    if not trained:
        raise DataError("no assistant message to train on (step_loss_mask is 0 on all of them, or they have no tokens)")
    kept, first = pieces[: trained[-1] + 1], trained[0]
    sample.tokens = [token for piece in kept for token in piece.ids]
    sample.spans = joined(Span(piece.source, len(piece.ids), piece.withheld) for piece in kept)
    sample.response_length = sum(len(piece.ids) for piece in kept[first:])
    sample.loss_mask = provenance.loss_mask(sample.spans, len(sample.tokens) - sample.response_length)
    sample.rollout_log_probs, sample.token_weight_versions = None, []
    sample.response = tokenizer.decode(
        sample.response_tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    if not first:
        raise DataError("no tokens before the assistant's first")
    sample.validate()
