"""The `Sample`, from prompt to reward: the data that every stage and every plugin handles.

Standard library only, so a reward plugin can be written and tested without torch. Field names are THUDM/slime's.
`tokens` holds prompt *and* response ids, while `loss_mask`, `rollout_log_probs` and `token_weight_versions` cover the
response only.

One response of three sampled tokens, one tool token and two sampled tokens::

    tokens                 P0 P1 P2 | S0 S1 S2 T0 S3 S4
    loss_mask                       |  1  1  1  0  1  1
    rollout_log_probs               | -.1 -.7 -.2 0. -.4 -.1
    token_weight_versions           |  7  7  7 -1  8  8      (weights were updated between the turns)
    spans                  USER 3     SAMPLED 3  TOOL 1  SAMPLED 2
    response_length = 6
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from slime_core.multimodal import image_ref, image_url, images_of
from slime_core.sample import provenance
from slime_core.sample.provenance import NOT_SAMPLED, TRAINABLE, Source, Span, Spans, TurnSpan
from slime_core.sample.routed_experts import routed_experts_after_call
from slime_core.sample.stored import Attributes, field_values, plain_values
from slime_core.sample.stored import PrefixCacheInfo as PrefixCacheInfo
from slime_core.sample.stored import SpecInfo as SpecInfo
from slime_core.secrets import hidden

if TYPE_CHECKING:
    from slime_core.protocols import Args


class SampleStatus(StrEnum):
    """The state of a sample; `PENDING` and `ABORTED` samples are generated further."""

    PENDING = "pending"
    """Not generated, or waiting to be continued."""
    COMPLETED = "completed"
    """The model ended its answer (stop token or stop string)."""
    TRUNCATED = "truncated"
    """Cut at the token limit."""
    ABORTED = "aborted"
    """Interrupted by the framework; the tokens are kept and the sample can be continued."""
    FAILED = "failed"
    """Generation or scoring raised an error; `metadata["failure"]` has the place and the reason."""


LARGEST_SCORE = 1e15
"""Largest absolute value of a reward or user metric; sums of its square over a rollout are finite in float32."""
_LONGEST_REASON = 2000
"""Number of characters kept of a failure's reason."""
_COLUMNS = ("loss_mask", "rollout_log_probs", "teacher_log_probs")
_LISTS = (
    *_COLUMNS, "token_weight_versions", "turns", "rollout_top_p_token_ids", "rollout_top_p_token_offsets",
    "rollout_routed_experts",
)  # fmt: skip
_FINISH_STATUS = {
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
    "stop": SampleStatus.COMPLETED,
}


def is_score(value: object) -> bool:
    """Return whether the value is a number with absolute value at most `LARGEST_SCORE`; False for NaN and infinity."""
    return isinstance(value, (int, float)) and abs(value) <= LARGEST_SCORE


@dataclass(slots=True)  # slots save 1.3 KB per sample
class Sample(Attributes):
    """A prompt with a response. Extend the response only through `append_response_tokens`.

    `vars(sample)` has extra attributes only; `attributes` has the fields, too.
    """

    group_index: int | None = None
    """Prompt group of the sample; unique over the run, the key of group normalisation."""
    index: int | None = None
    """Number of the sample, unique over the run."""
    rollout_id: int | None = None
    """Id of one execution of one of the N samples; fan-out siblings share it."""
    prompt: str | list[dict[str, Any]] = ""
    """Prompt as text or chat messages."""
    tokens: list[int] = field(default_factory=list)
    """[prompt + response] token ids."""
    multimodal_inputs: dict[str, Any] | None = None
    """`{"images": [...]}`, in the order of the prompt: a path or a `data:` URL each (`multimodal.image_ref`). User code
    may add web addresses for its own use; they are kept."""
    multimodal_train_inputs: Any = None
    """Model inputs besides the tokens: a `TrainInputs`, or a mapping of arrays that can be converted to it."""
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    """Response text, tool output included."""
    response_length: int = 0
    """Number of response tokens at the end of `tokens`."""
    label: Any = None
    """Reference answer from the data set."""
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """[response_length] 1 on tokens to train; None: all tokens that `spans` let train, without spans all."""
    weight_versions: list[str] = field(default_factory=list)
    """Weight version of each engine call."""
    rollout_log_probs: list[float] | None = None
    """[response_length] log-probability under the sampling policy, in nats; 0.0 where not sampled."""
    rollout_top_p_token_ids: list[int] | None = None
    """Candidate ids of each response token, token after token: the ids that top-p, top-k or min-p left. Engines return
    them with `--use-sampling-mask`, which also uses them in training."""
    rollout_top_p_token_offsets: list[int] | None = None
    """[response_length + 1] offsets into `rollout_top_p_token_ids`; no ids: sampled from all ids, or not sampled."""
    rollout_routed_experts: Any = None
    """[len(tokens) - 1, layers, top_k] experts the engine routed to (MoE routing replay): a `RoutedExperts`, or a value
    that `numpy.asarray` converts to such an array; -1 if unknown."""
    remove_sample: bool = False
    """True to keep the sample in group statistics but train on none of its tokens."""
    teacher_log_probs: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    """Overrides `--custom-generate-function-path` for this sample."""
    custom_rm_path: str | None = None
    """Overrides `--custom-rm-path` for this sample."""
    train_metadata: dict[str, Any] | None = None
    """Passed through to the trainer."""
    session_id: str | None = None
    """Routes all turns of the sample to one engine."""
    non_generation_time: float = 0.0
    """Seconds spent outside the engine (tools, environments)."""
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    token_weight_versions: list[int] = field(default_factory=list)
    """[response_length] weight version that sampled each token; `NOT_SAMPLED` elsewhere."""
    row: int | None = None
    """Row of the prompt in `--prompt-data`, which identifies the prompt over the epochs."""
    spans: list[Span] | None = None
    """Author of each of `tokens`, prompt included. If None or only the prompt's spans, authorship was not recorded, and
    `admission.settled` derives the rest from the other fields."""
    reward_components: dict[str, float] | None = None
    """Parts of the reward by name, such as {"format": 1.0, "answer": 0.0}; from a mapping `reward` they are all its
    numbers except the entry of `--reward-key`."""
    turns: list[TurnSpan] | None = None
    """Turns with a reward, role, id or state (`end_turn`); `known_turns` adds the others from `spans`."""
    sampled_after: int | None = None
    """Digest of the prompt's ids that the response was appended to; None if no response was appended."""

    Status = SampleStatus
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    def __post_init__(self) -> None:
        for name in ("group_index", "index", "rollout_id"):
            if isinstance(getattr(self, name), (str, list)):
                raise TypeError(
                    f"Sample: {name} is {getattr(self, name)!r:.80}; expected a number. Name the fields:"
                    " Sample(group_index=0, index=1, prompt=..., tokens=...)"
                )

    # -- reading -------------------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> list[int]:
        """Token ids of the prompt."""
        return self.tokens[: len(self.tokens) - self.response_length]

    @property
    def response_tokens(self) -> list[int]:
        """Token ids of the response."""
        return self.tokens[len(self.tokens) - self.response_length :]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def oldest_version(self, unknown: int) -> int:
        """Return the oldest weight version of the engine calls that is a number, or `unknown`."""
        return min((int(v) for v in map(str, self.weight_versions) if v.isdecimal()), default=unknown)

    @property
    def is_lost(self) -> bool:
        """True if the sample failed or was aborted and has no reward. A sample that has a reward is trained on."""
        return self.status in (SampleStatus.FAILED, SampleStatus.ABORTED) and self.reward is None

    @property
    def is_removed(self) -> bool:
        """True if the sample is not trained on: lost, or removed by a filter (`remove_sample`)."""
        return self.remove_sample or self.is_lost

    def image_data(self) -> list[str]:
        """The prompt's images as `data:` URLs, for engines. Raises ValueError if an image cannot be read here."""
        return [image_url(image_ref(image)) for image in images_of(self.multimodal_inputs)]

    def get_reward_value(self, args: Args) -> float:
        """Return the scalar reward: `reward` itself, or `reward[args.reward_key]` if a key is set."""
        key = args.reward_key
        return self.reward if not key else self.reward[key]  # type: ignore[return-value,index]

    def finite_reward(self, args: Args) -> float | None:
        """Return the scalar reward, for display or comparison; None if it is missing or `is_score` rejects it."""
        value: Any = self.reward
        if isinstance(value, Mapping):
            value = value.get(args.reward_key) if args.reward_key else None
        return float(value) if is_score(value) else None

    def note_components(self, key: str | None) -> None:
        """Copy the numbers of a mapping `reward`, except the entry `key`, into `reward_components`."""
        if isinstance(self.reward, Mapping):
            found = {str(name): float(v) for name, v in self.reward.items() if name != key and is_score(v)}
            self.reward_components = {**(self.reward_components or {}), **found} or None

    # -- extending -----------------------------------------------------------------------------------

    def append_response_tokens(
        self,
        args: Args | None = None,
        tokens: Sequence[int] = (),
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
        source: str | None = None,
    ) -> None:
        """Append response tokens, keeping tokens, spans, log-probs, loss mask and weight versions aligned.

        A column that the response does not have so far (log-probs, versions) is not started in its middle. Empty
        `tokens`: the turn ended before its first token, and only `meta_info` is applied.

        Args:
            args: The run's arguments: `sglang_speculative_algorithm`, for counters that have no `spec_verify_ct`.
            tokens: [n] ids.
            log_probs: [n] log-probs of the sampling policy: required when `trainable` and there are tokens; otherwise
                None, or zeros.
            trainable: True for tokens the policy sampled; False for tool output and template tokens.
            meta_info: The engine's answer (`finish_reason`, `weight_version`, `token_weight_versions`,
                `routed_experts`, `output_token_sampling_mask`, ...).
            text: Text to append to `response`.
            update_terminal_info: False leaves `status` and the per-call counters alone (stream chunks).
            source: Author of the tokens (`provenance.Source`); by default SAMPLED if `trainable`, else TOOL.

        Raises:
            ValueError: The tokens cannot be aligned with what the sample already holds; it is unchanged.
        """
        meta_info = meta_info or {}
        writer = provenance.writer_of(source, trainable)
        new_log_probs, versions = self._checked_extension(list(tokens), log_probs, trainable, meta_info)
        total = len(self.tokens) + len(tokens)
        routed = routed_experts_after_call(self.rollout_routed_experts, meta_info if trainable else {}, total, args)
        kept = _listed(self.rollout_top_p_token_ids), _listed(self.rollout_top_p_token_offsets)
        if trainable and tokens:
            mask = self.loss_mask or [1] * self.response_length
            kept = _kept_after_call(kept, mask, tokens, meta_info.get("output_token_sampling_mask"))
        elif kept[1] is not None:
            kept = kept[0], [*kept[1], *[kept[1][-1]] * len(tokens)]
        if not self.response_length:  # the response follows the prompt that the caller set
            self.sampled_after = provenance.digest(self.tokens)
            if self.spans is not None and provenance.num_tokens(self.spans) != len(self.tokens):
                self.spans = None
        spans = self.known_spans()
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        provenance.add_span(spans, writer, len(tokens), "" if writer != Source.DEMONSTRATION else "context")
        self.spans = spans
        begun = self.response_length > 0
        self.tokens.extend(tokens)
        self.response_length += len(tokens)
        self.loss_mask.extend([int(trainable)] * len(tokens))
        if self.rollout_log_probs is not None or not begun:
            self.rollout_log_probs = [*(self.rollout_log_probs or []), *new_log_probs]
        if self.token_weight_versions or not begun:
            self.token_weight_versions.extend(versions)
        self.rollout_routed_experts = routed
        self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = kept
        if text is not None:
            self.response += text
        if update_terminal_info and meta_info:
            self.take_meta_info(meta_info, len(tokens), args)

    def known_spans(self) -> Spans:
        """Return a copy of `spans`, completed from the other fields if only the prompt's spans were recorded.

        Raises:
            ValueError: `spans` holds a value that is not a span.
        """
        prompt_length = len(self.tokens) - self.response_length
        told = self._untold_prompt(prompt_length) if self.spans is None else provenance.from_json(self.spans)
        if self.response_length and provenance.num_tokens(told) == prompt_length:
            told += provenance.response_spans(
                self.response_length, self.loss_mask, self.token_weight_versions, self.rollout_log_probs
            )
        return told

    def _untold_prompt(self, length: int) -> Spans:
        source = Source.USER if isinstance(self.prompt, str) else Source.TEMPLATE  # chat messages mix several authors
        return [Span(source, length)] if length else []

    def known_turns(self) -> list[TurnSpan]:
        """Return the turns of the response: `turns`, then one for each further run of tokens of the model."""
        turns = list(self.turns or ())
        end, start = turns[-1].last if turns else 0, self.response_length - len(self.tokens)
        for by_model, run in groupby(self.known_spans(), lambda span: span.source in TRAINABLE):
            first, start = max(start, end), start + provenance.num_tokens(run)
            if by_model and first < start:
                turns.append(TurnSpan(first, start))
        return turns

    def end_turn(self, reward: float | None = None, *, role: str = "", id: str = "", state: str | None = None) -> None:
        """Record facts about the newest turn: the tokens that the model wrote since the last recorded turn.

        Without such tokens the turn is empty. The arguments are the fields of `TurnSpan`.
        """
        turns = self.known_turns()
        if len(turns) == len(self.turns or ()):
            turns.append(TurnSpan(self.response_length, self.response_length))
        self.turns = [*turns[:-1], turns[-1]._replace(reward=reward, role=role, id=id, state=state)]

    def withhold(self, first: int, last: int, reason: str) -> None:
        """Exclude response tokens [first, last) from training and store the reason in `spans`.

        Raises:
            ValueError: The response has no tokens [first, last), or `reason` is empty.
        """
        if not 0 <= first <= last <= self.response_length:
            raise ValueError(f"{self._name()}: no response tokens {first} to {last}; it has {self.response_length}")
        prompt_length = len(self.tokens) - self.response_length
        self.spans = provenance.withhold(self.known_spans(), prompt_length + first, prompt_length + last, reason)
        mask = provenance.loss_mask(self.spans, prompt_length) if self.loss_mask is None else list(self.loss_mask)
        mask[first:last] = [0] * (last - first)
        self.loss_mask = mask

    def _checked_extension(
        self,
        tokens: list[int],
        log_probs: Sequence[float] | None,
        trainable: bool,
        meta_info: Mapping[str, Any],
    ) -> tuple[list[float], list[int]]:
        """Return the log-probs and versions to append. Raises ValueError before anything is changed."""
        n = len(tokens)
        self.validate()
        if not n and not log_probs:
            return [], []
        if self.teacher_log_probs is not None:
            raise ValueError(f"{self._name()}: a teacher has scored the response; set teacher_log_probs to None first")
        if not {int}.issuperset(map(type, tokens)) or min(tokens, default=0) < 0:
            raise ValueError(f"{self._name()}: token ids must be integers >= 0")
        if not trainable:
            if log_probs is not None and (len(log_probs) != n or any(log_probs)):
                raise ValueError(f"{self._name()}: log_probs given for {n} tokens that no policy sampled")
            return [0.0] * n, [NOT_SAMPLED] * n
        if log_probs is None:
            raise ValueError(f"{self._name()}: {n} sampled tokens need their log_probs")
        if len(log_probs) != n:
            raise ValueError(f"{self._name()}: {n} sampled tokens but {len(log_probs)} log_probs")
        if n and (math.isnan(sum(log_probs)) or max(log_probs) > provenance.POSITIVE_LOG_PROB):
            raise ValueError(f"{self._name()}: log_probs are {list(log_probs)!r:.80}; expected numbers <= 0")
        if self.response_length and self.rollout_log_probs is None:
            raise ValueError(
                f"{self._name()}: cannot append log_probs to a response of {self.response_length} tokens without any"
            )
        versions = meta_info.get("token_weight_versions")
        if versions is None:
            versions = [provenance.version_number(meta_info.get("weight_version"))] * n
        if len(versions) != n:
            raise ValueError(f"{self._name()}: {n} sampled tokens but {len(versions)} token_weight_versions")
        return list(map(float, log_probs)), list(map(int, versions))

    def take_meta_info(self, meta_info: Mapping[str, object], num_tokens: int, args: Args | None = None) -> None:
        """Apply status, weight version and counters of one engine answer of `num_tokens` tokens."""
        reason = meta_info.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        self.status = _FINISH_STATUS.get(str(kind), self.status)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))
        self.prefix_cache_info.add(meta_info)
        given = getattr(args, "model_extra", None) or getattr(args, "__dict__", {})  # `args` itself is slow to say no
        if "spec_verify_ct" in meta_info or given.get("sglang_speculative_algorithm"):
            self.spec_info.add(meta_info, num_tokens)

    def validate(self) -> None:
        """Raise ValueError if a per-token field is no list or does not have the response's length."""
        length = self.response_length
        if not hasattr(self.tokens, "__len__"):
            raise ValueError(f"{self._name()}: tokens is {type(self.tokens).__name__}; expected a list")
        if not hasattr(length, "__index__") or length < 0:
            raise ValueError(f"{self._name()}: response_length is {length!r}; expected a count")
        if length > len(self.tokens):
            raise ValueError(f"{self._name()}: response_length {length} exceeds {len(self.tokens)} tokens")
        for name in _LISTS:
            if (value := getattr(self, name)) is None:
                continue
            if not hasattr(value, "__len__"):
                raise ValueError(f"{self._name()}: {name} is {type(value).__name__}; expected a list")
            if name in _COLUMNS and len(value) != length:
                raise ValueError(f"{self._name()}: {name} has {len(value)} entries for {length} tokens")
        versions = self.token_weight_versions
        if versions and len(versions) != length:
            raise ValueError(f"{self._name()}: token_weight_versions has {len(versions)} entries for {length} tokens")
        offsets = self.rollout_top_p_token_offsets
        if offsets is not None and (
            len(offsets) != length + 1 or offsets[-1] != len(_listed(self.rollout_top_p_token_ids) or ())
        ):
            raise ValueError(
                f"{self._name()}: rollout_top_p_token_offsets needs {length + 1} entries, up to the number of"
                " rollout_top_p_token_ids"
            )
        if self.turns:
            provenance.check_turns(self.turns, length, self._name())
        routed = self.rollout_routed_experts
        if routed is not None and len(routed) != len(self.tokens) - 1:
            raise ValueError(
                f"{self._name()}: rollout_routed_experts has {len(routed)} rows for {len(self.tokens)} tokens;"
                " one for each but the last is needed"
            )

    def _name(self) -> str:
        return f"sample {self.index}" if self.index is not None else "sample"

    def fail(self, where: str, error: BaseException | str) -> None:
        """Mark the sample FAILED; `where` names the boundary ("generate", "reward 'math'", ...).

        Its reward is removed, and so is a response whose per-token fields do not match (see `validate`).
        """
        try:
            self.validate()
        except ValueError:
            self.tokens = list(self.tokens) if hasattr(self.tokens, "__len__") else []
            fits = hasattr(self.response_length, "__index__") and 0 <= self.response_length <= len(self.tokens)
            self.response_length = self.response_length if fits else 0
            self.reset_for_retry()
        self.status, self.reward, self.reward_components = SampleStatus.FAILED, None, None
        kind = type(error).__name__ if isinstance(error, BaseException) else "error"
        reason = hidden(f"{kind}: {error}")
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]}... ({len(reason)} characters)"
        self.metadata = {**(self.metadata or {}), "failure": {"where": where, "error": reason}}

    def reset_for_retry(self) -> None:
        """Forget the response, so the prompt can be regenerated."""
        self.tokens = self.prompt_tokens
        try:
            told = provenance.part(provenance.from_json(self.spans or ()), 0, len(self.tokens))
        except (TypeError, ValueError):  # user code may set any value
            told = []
        complete = provenance.num_tokens(told) == len(self.tokens)
        self.spans = told if complete and told != self._untold_prompt(len(self.tokens)) else None
        self.response, self.response_length, self.reward, self.sampled_after = "", 0, None, None
        self.loss_mask = self.rollout_log_probs = self.teacher_log_probs = None
        self.turns = self.reward_components = None
        self.rollout_top_p_token_ids = self.rollout_top_p_token_offsets = self.rollout_routed_experts = None
        self.weight_versions, self.token_weight_versions = [], []
        self.spec_info, self.prefix_cache_info = SpecInfo(), PrefixCacheInfo()
        self.status, self.remove_sample, self.non_generation_time = SampleStatus.PENDING, False, 0.0

    # -- storing -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, unknown attributes included; `from_dict` restores them."""
        return plain_values(self.attributes())

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Sample:
        """Return the sample from the values of `to_dict`; keys that are not fields become attributes."""
        data = field_values(data)
        data["status"] = SampleStatus(data.get("status", SampleStatus.PENDING))
        sample = cls()
        for key, value in data.items():
            setattr(sample, key, value)
        return sample


def _listed(column: Any) -> list[int] | None:
    """Return the column as a list; THUDM/slime's code may also pass tensors."""
    found: list[int] | None = column.tolist() if hasattr(column, "tolist") else column
    return found


_Kept: TypeAlias = tuple[list[int] | None, list[int] | None]


def _kept_after_call(
    kept: _Kept, loss_mask: Sequence[int], tokens: Sequence[int], rows: Sequence[Sequence[int]] | None
) -> _Kept:
    """Return the candidate ids and their offsets after `tokens` were sampled; unknown for all if unknown for one token.

    Args:
        kept: Ids, token after token, and [tokens + 1] offsets of the response so far; (None, None) if unknown.
        loss_mask: Mask of the response so far; if none of it was sampled, the columns begin here.
        tokens: Appended tokens.
        rows: Ids that each token was sampled among; an empty row stands for all ids.

    Raises:
        ValueError: The rows do not belong to the tokens.
    """
    ids, offsets = kept[0] or [], kept[1]
    if offsets is None and rows is not None and not any(loss_mask):
        offsets = [0] * (len(loss_mask) + 1)
    if offsets is None or rows is None:
        return None, None
    if len(rows) != len(tokens) or any(row and token not in row for token, row in zip(tokens, rows)):
        raise ValueError(f"output_token_sampling_mask does not have the {len(tokens)} sampled tokens")
    return [*ids, *chain.from_iterable(rows)], [*offsets[:-1], *accumulate(map(len, rows), initial=offsets[-1])]


Group: TypeAlias = list[Sample]
"""The samples of one prompt."""
