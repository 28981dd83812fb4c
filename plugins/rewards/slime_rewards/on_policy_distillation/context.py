"""Prompts of a teacher that sees more than the policy: a solution, feedback, or another response that was right.

OPSD (Zhao et al., arXiv 2601.18734, 2026) shows the same model a reference solution; SDPO (Huebotter et al., arXiv
2601.20802, 2026) shows it feedback on the response and a response of the group that succeeded. The response is the
policy's own; the teacher only scores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from string import Formatter
from typing import Any

from slime_core import Args, Sample, encode_prompt, prompt_tools
from slime_core.errors import PluginError

PEER = "peer"


def fields_of(template: str) -> list[str]:
    """Return the names of a template's fields. Raises ValueError for a field that is more than a name."""
    names = []
    for _, name, spec, conversion in Formatter().parse(template):
        if name is None:
            continue
        if not name.isidentifier() or spec or conversion:
            raise ValueError(f"{template!r}: a field is a name in braces, such as {{label}}; write {{{{ for a brace")
        names.append(name)
    return names


class Contexts:
    """Renders the first template whose fields a sample has, as the prompt of the teacher.

    Fields: `prompt` (text of the last message), `label`, `peer` (another response of the group that was right), and
    entries of the sample's metadata, such as `feedback`.

    Args:
        args: The run's settings; the tokenizer is that of `hf_checkpoint`.
        templates: In order of preference.
        peer_reward: Least reward of a response that is right.
    """

    def __init__(self, args: Args, templates: Sequence[str], peer_reward: float) -> None:
        self._args, self._peer_reward = args, peer_reward
        self._templates = [(template, fields_of(template)) for template in templates]
        self.reads_peers = any(PEER in names for _, names in self._templates)
        """True if a sample's prompt depends on the others of its group."""

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._args.hf_checkpoint, local_files_only=True)

    def prompt_of(self, sample: Sample, rewards: Sequence[tuple[Sample, float]]) -> list[int] | None:
        """Return the token ids of the teacher's prompt; None if the sample has the fields of no template.

        Args:
            sample: A finished sample.
            rewards: The group's samples with their rewards, in order.

        Raises:
            PluginError: The prompt has images.
            DataError: The chat template refuses the messages.
        """
        if sample.multimodal_inputs:
            raise PluginError(
                f"sample {sample.index}: plugins.on_policy_distillation.context takes prompts of text only"
            )
        found = {**sample.metadata, "prompt": _text(sample), "label": sample.label, PEER: self._peer(sample, rewards)}
        for template, names in self._templates:
            values = {name: found.get(name) for name in names}
            if all(value not in (None, "") for value in values.values()):
                tools = prompt_tools(self._args, sample.metadata)
                prompt = _with_text(sample.prompt, template.format_map(values))
                return encode_prompt(self._tokenizer, prompt, self._args, tools, environment=True)
        return None

    def _peer(self, sample: Sample, rewards: Sequence[tuple[Sample, float]]) -> str | None:
        """Return the next response of the group that is right, beginning after the sample."""
        place = next((i for i, (other, _) in enumerate(rewards) if other is sample), 0)
        others = [*rewards[place + 1 :], *rewards[:place]]
        return next((other.response for other, reward in others if reward >= self._peer_reward), None)


def _text(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    content = sample.prompt[-1].get("content") if sample.prompt else None
    if not isinstance(content, str):
        raise PluginError(f"sample {sample.index}: the last message of its prompt has no text to add a context to")
    return content


def _with_text(prompt: str | Sequence[Mapping[str, Any]], text: str) -> str | list[Mapping[str, Any]]:
    return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]
