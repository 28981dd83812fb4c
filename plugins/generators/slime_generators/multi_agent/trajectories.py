"""A role's trajectory: its prompt, its turns, and the text inserted between its turns.

Every role has a separate `Sample` with its own log-probs and versions. Answers of other roles are in it as user text,
encoded once, and never as the other roles' tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from slime_core import Args, GenerateContext, Sample, SampleStatus, encode_prompt, turn_delta
from slime_core.errors import ConfigError
from slime_core.tools import split_reasoning
from slime_generators.multi_agent.options import QUESTION, Role, adapter_of


class Trajectory:
    """A role at work on its sample."""

    def __init__(self, args: Args, role: Role, sample: Sample, context: GenerateContext) -> None:
        self.role, self.sample = role, sample
        self._args, self._context = args, context

    @property
    def turns(self) -> int:
        """Number of finished turns."""
        return int(self.sample.metadata.get("num_turns", 0))

    def prepare(self, said: Mapping[str, str]) -> None:
        """Write the text before the role's next turn.

        Args:
            said: The question, and the roles' newest answers.

        Raises:
            DataError: The chat template refuses the messages, or there is no chat template.
        """
        if self.turns:
            self._append(_filled(str(self.role.again), said))
        elif self.role.prompt is not None:
            system = [{"role": "system", "content": _filled(self.role.system, said)}] if self.role.system else []
            messages = [*system, {"role": "user", "content": _filled(self.role.prompt, said)}]
            self.sample.prompt, self.sample.spans = messages, None
            self.sample.tokens = encode_prompt(
                self._context.tokenizer, messages, self._args, environment=True, noted=self.sample.metadata
            )

    def _append(self, text: str) -> None:
        sample, tokenizer = self.sample, self._context.tokenizer
        prompt = sample.prompt
        pieces = turn_delta(
            tokenizer,
            self._args,
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
            [{"role": "user", "content": text}],
            sampled_ids=self._turn_tokens(),
            template_kwargs=sample.apply_chat_template_kwargs,
            noted=sample.metadata,
        )
        for ids, source in pieces:
            shown = tokenizer.decode(ids, skip_special_tokens=False)
            sample.append_response_tokens(self._args, ids, trainable=False, text=shown, source=source)

    async def speak(self, params: Mapping[str, Any]) -> bool:
        """Sample a turn, or the rest of one; return False if it was cut short or no token is left for it."""
        sample = self.sample
        room = int(params["max_new_tokens"]) - sample.response_length
        if self.role.max_new_tokens is not None:
            room = min(room, self.role.max_new_tokens - (len(self._turn_tokens()) if self._is_partial() else 0))
        if room <= 0:
            sample.status = SampleStatus.TRUNCATED
            return False
        adapter = adapter_of(self._args, self.role)
        own: Any = {} if adapter is None else {"adapter": adapter}
        output = await self._context.engine.generate(
            sample.tokens, {**params, "max_new_tokens": room}, session_id=sample.session_id, **own
        )
        sample.append_response_tokens(
            self._args, output.token_ids, output.log_probs, meta_info=output.meta_info, text=output.text
        )
        if sample.status != SampleStatus.ABORTED:
            sample.end_turn(role=self.role.name)
        if sample.status == SampleStatus.COMPLETED:
            sample.metadata["num_turns"] = self.turns + 1
        return sample.status == SampleStatus.COMPLETED

    def answer(self) -> str:
        """Return the text of the role's last turn, without its reasoning."""
        text = self._context.tokenizer.decode(self._turn_tokens(), skip_special_tokens=True)
        return split_reasoning(text)[1].strip()

    def _is_partial(self) -> bool:
        return bool(self.sample.token_weight_versions) and self.sample.token_weight_versions[-1] >= 0

    def _turn_tokens(self) -> list[int]:
        versions = self.sample.token_weight_versions
        start = next((i + 1 for i in range(len(versions) - 1, -1, -1) if versions[i] < 0), 0)
        return self.sample.response_tokens[start:]


def sibling(origin: Sample, role: Role) -> Sample:
    """Return a sample for another role of the same execution, without prompt and response."""
    return Sample(
        group_index=origin.group_index,
        index=origin.index,
        rollout_id=origin.rollout_id,
        row=origin.row,
        prompt="",
        label=copy.deepcopy(origin.label),
        apply_chat_template_kwargs=origin.apply_chat_template_kwargs,
        custom_rm_path=origin.custom_rm_path,
        generate_function_path=origin.generate_function_path,
        session_id=f"{origin.session_id}-{role.name}" if origin.session_id else None,
        metadata={k: copy.deepcopy(v) for k, v in origin.metadata.items() if k not in ("num_turns", "multi_agent")},
    )


def question_of(args: Args, sample: Sample) -> str:
    """Return the text of the row's last user message, or its prompt. Raises ConfigError for a rendered prompt."""
    if isinstance(sample.prompt, str):
        if args.apply_chat_template:
            raise ConfigError(
                "the row's prompt was turned into text by --apply-chat-template, so roles cannot be told its question:"
                " give rows whose prompt column is a list of chat messages, and leave --apply-chat-template out"
            )
        return sample.prompt
    asked = [message.get("content") for message in sample.prompt if message.get("role") == "user"]
    return str(asked[-1]) if asked else ""


def _filled(text: str, said: Mapping[str, str]) -> str:
    return text.format_map({QUESTION: "", **said})
