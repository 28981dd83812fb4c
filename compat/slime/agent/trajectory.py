"""`slime.agent.trajectory.TrajectoryManager`: convert turns that a user's own server recorded to samples.

Built on `slime_agent_base_url.tree` (which messages belong together) and `.linearise` (which tokens belong together). A
turn needs the log-probs of its tokens, since they are trained on; THUDM/slime uses 0.0 for missing log-probs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_agent_base_url.linearise import Line, linearise
from slime_agent_base_url.sessions import FORK_THRESHOLD
from slime_agent_base_url.tree import MessageTree, Prompt, Turn

from slime import _missing
from slime_core.sample import GenerationOutput, Sample, SampleStatus, provenance


@dataclass(frozen=True)
class TurnRecord:
    """A recorded answer of the engine."""

    prompt_ids: list[int]
    """[p] token ids of the prompt."""
    output_ids: list[int]
    """[n] token ids of the answer."""
    finish_reason: str
    """ "stop" or "length"."""
    output_log_probs: list[float] = field(default_factory=list)
    """[n] log-probs in nats."""
    ill_formed: bool = False
    """True if a tool call in the answer could not be parsed."""


class TrajectoryManager:
    """The turns of many sessions."""

    def __init__(self, *, fork_threshold_tokens: int | None = None) -> None:
        """`fork_threshold_tokens`: an answer of fewer tokens that the client rewrote is dropped from its sequence."""
        self._threshold = FORK_THRESHOLD if fork_threshold_tokens is None else fork_threshold_tokens
        self._trees: dict[str, MessageTree] = {}
        self._turns: dict[str, int] = {}

    def has_session(self, sid: str) -> bool:
        """Return True if a turn of the session was recorded."""
        return sid in self._trees

    def turn_count(self, sid: str) -> int:
        """Return the number of recorded turns."""
        return self._turns.get(sid, 0)

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: list[dict[str, Any]],
        response_message: dict[str, Any] | None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Record one answer.

        Args:
            sid: The session.
            turn: Tokens of the turn.
            prompt_messages: Messages before the answer; without messages nothing is recorded.
            response_message: The answer as the client will send it back.
            metadata: Unused; a parameter of THUDM/slime.

        Raises:
            ValueError: The turn has no log-probs, or a different number of log-probs than tokens.
        """
        if not prompt_messages:
            return
        if len(turn.output_log_probs) != len(turn.output_ids):
            raise ValueError(
                f"session {sid!r}: {len(turn.output_ids)} output_ids and {len(turn.output_log_probs)} output_log_probs;"
                " ask the engine for them (return_logprob)"
            )
        tree = self._trees.setdefault(sid, MessageTree(rewrite_threshold=self._threshold))
        meta = {"finish_reason": {"type": turn.finish_reason}}
        output = GenerationOutput(list(turn.output_ids), list(turn.output_log_probs), "", meta)
        answer = response_message or {"role": "assistant", "content": ""}
        made = Turn(Prompt(list(turn.prompt_ids)), output, int(turn.ill_formed), len(answer.get("tool_calls") or []))
        tree.add(tree.find(prompt_messages), prompt_messages, answer, made).delivered = True
        self._turns[sid] = self.turn_count(sid) + 1

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = None,
        extra_metadata: Mapping[str, Any] | None = None,
        max_sample_tokens: int = 0,
    ) -> list[Sample]:
        """End the session and return its trajectories as samples that share a `rollout_id`.

        Args:
            sid: The session; an unknown session has no trajectories.
            base_sample: Template of the samples, which differ from it in the response.
            reward: Reward of each sample.
            extra_metadata: Added to their metadata, besides `truncated`, `use_tool` and `ill_formed`.
            max_sample_tokens: Length to which longer samples are cut; 0: no cut. Samples without trained tokens are
                left out.
        """
        tree = self._trees.pop(sid, None)
        self._turns.pop(sid, None)
        if tree is None:
            return []
        lines = linearise(tree.paths(), fork_threshold=self._threshold)
        samples = [_sample(line, base_sample, reward, extra_metadata or {}, max_sample_tokens) for line in lines]
        return [sample for sample in samples if any(sample.loss_mask or [])]

    def drop_session(self, sid: str) -> None:
        """Remove the session."""
        self._trees.pop(sid, None)
        self._turns.pop(sid, None)


def _sample(line: Line, base: Sample, reward: Any, extra: Mapping[str, Any], longest: int) -> Sample:
    sample = copy.deepcopy(base)
    sample.reset_for_retry()
    line.trajectory.write(sample)
    truncated = line.turns[-1].finish == "length"
    sample.rollout_id = base.rollout_id if base.rollout_id is not None else base.index
    sample.reward = copy.deepcopy(reward)
    sample.status = SampleStatus.TRUNCATED if truncated else SampleStatus.COMPLETED
    sample.metadata |= {
        **extra,
        "truncated": truncated,
        "use_tool": any(turn.tool_calls for turn in line.turns),
        "ill_formed": any(turn.ill_formed for turn in line.turns),
    }
    if longest and len(sample.tokens) > longest:
        _cut(sample, longest)
    return sample


def _cut(sample: Sample, length: int) -> None:
    """Keep the first `length` tokens."""
    kept = max(length - (len(sample.tokens) - sample.response_length), 0)
    sample.spans = provenance.part(sample.known_spans(), 0, length)
    sample.tokens = sample.tokens[:length]
    for name in ("loss_mask", "rollout_log_probs", "token_weight_versions"):
        setattr(sample, name, (getattr(sample, name) or [])[:kept])
    sample.response_length = kept
    sample.metadata["truncated"] = True


__all__ = ["TrajectoryManager", "TurnRecord"]
__getattr__ = _missing.names(__name__)
