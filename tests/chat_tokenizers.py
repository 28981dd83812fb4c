"""Byte-level tokenizers with chat templates in the manner of published model families, written for these tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen2.5": ("<|im_end|>", ("<|im_start|>", "<|endoftext|>")),
    "qwen3": ("<|im_end|>", ("<|im_start|>", "<|endoftext|>", "<think>", "</think>")),
    "llama3": ("<|eot_id|>", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")),
    "glm4": ("<|endoftext|>", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")),
    "deepseek": (
        "<EOS>",
        ("<BOS>", "<|User|>", "<|Assistant|>", "<|call|>", "<|/call|>", "<|outputs|>", "<|output|>", "<|/output|>",
         "<|/outputs|>", "<think>", "</think>"),
    ),
}  # fmt: skip
"""Family -> token that ends a turn, and the other special tokens.

| family | its template, in `chat_templates/` |
|---|---|
| qwen2.5 | ChatML with a default system prefix; consecutive tool messages share one user turn |
| qwen3 | ChatML that drops the reasoning of turns before the last question |
| llama3 | header tokens around roles, its own BOS, tool answers as JSON, a turn with a call without its text |
| glm4 | no token ends a turn: the next speaker's does, and the model samples it |
| deepseek | system messages first; no reasoning; the assistant continues after tools without a prompt |
"""


def template(family: str) -> str:
    """Return the family's chat template."""
    return (Path(__file__).parent / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")


@functools.cache
def chat_tokenizer(family: str) -> Any:
    """The family's template on a tokenizer of one token per byte, with merges for the letters' commonest pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end, specials = FAMILIES[family]
    merges = [tuple(pair) for pair in ("th", "er", "\u010a\u010a", "\u0120t", "in", "\u0120a", "}\u010a")]
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|pad|>", end, *specials)])
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token=end
    )
    fast.chat_template = template(family)
    return fast


def save(family: str, directory: Path) -> Path:
    """Write the tokenizer's files, as a model directory holds them."""
    chat_tokenizer(family).save_pretrained(directory)
    return directory
