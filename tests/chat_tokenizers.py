"""Byte-level tokenizers with chat templates in the manner of published model families, written for these tests."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

_QWEN_TOOLS = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- DEFAULT %}
{%- endif %}
"""

_QWEN_CALLS = """
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
"""

_QWEN_TOOL_TURN = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""

QWEN25 = (
    _QWEN_TOOLS.replace("{%- DEFAULT %}", "{%- else %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}")
    + """
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}"""
    + _QWEN_CALLS
    + """{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}"""
    + _QWEN_TOOL_TURN
    + """{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
"""ChatML with a default system prefix; consecutive tool messages share one user turn."""

QWEN3 = (
    _QWEN_TOOLS.replace("{%- DEFAULT %}", "")
    + """
{%- set ns = namespace(asked=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set text = message.content or '' %}
{%- set thought = '' %}
{%- if '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.asked and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- text }}"""
    + _QWEN_CALLS
    + """{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}"""
    + _QWEN_TOOL_TURN
    + """{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)
"""ChatML that drops the reasoning of turns before the last question."""

LLAMA3 = """
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""Header tokens around roles, the template's own BOS, tool answers as JSON, a turn with a call without its text."""

GLM4 = """
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{- '<|observation|>\\n' + message.content }}
{%- else %}{{- '<|' + message.role + '|>\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' + call.function.name + '\\n' + (call.function.arguments | tojson) }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
"""No token ends a turn: the next speaker's does, and the model samples it."""

DEEPSEEK = """
{%- set ns = namespace(tool=false) %}
{{- '<BOS>' }}
{%- for message in messages %}{%- if message.role == 'system' %}{{- message.content }}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|User|>' + message.content }}{%- set ns.tool = false %}
{%- elif message.role == 'assistant' %}
{%- if not ns.tool %}{{- '<|Assistant|>' }}{%- endif %}
{%- set ns.tool = false %}
{%- set text = message.content or '' %}
{%- if '</think>' in text %}{%- set text = text.split('</think>')[-1] %}{%- endif %}
{{- text }}
{%- for call in message.tool_calls or [] %}
{{- '<|call|>' + call.function.name + '\\n' + (call.function.arguments | tojson) + '<|/call|>' }}
{%- endfor %}
{{- '<EOS>' }}
{%- elif message.role == 'tool' %}
{%- if not ns.tool %}{{- '<|outputs|>' }}{%- endif %}
{%- set ns.tool = true %}
{{- '<|output|>' + message.content + '<|/output|>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|/outputs|>' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{- '<|Assistant|>' }}{%- endif %}
"""
"""All system messages first; reasoning dropped from every turn; the assistant goes on after tools without a prompt."""

FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "qwen2.5": (QWEN25, "<|im_end|>", ("<|im_start|>", "<|endoftext|>")),
    "qwen3": (QWEN3, "<|im_end|>", ("<|im_start|>", "<|endoftext|>", "<think>", "</think>")),
    "llama3": (LLAMA3, "<|eot_id|>", ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>")),
    "glm4": (
        GLM4,
        "<|endoftext|>",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "deepseek": (
        DEEPSEEK,
        "<EOS>",
        ("<BOS>", "<|User|>", "<|Assistant|>", "<|call|>", "<|/call|>", "<|outputs|>", "<|output|>", "<|/output|>",
         "<|/outputs|>", "<think>", "</think>"),
    ),
}  # fmt: skip


@functools.cache
def chat_tokenizer(family: str) -> Any:
    """The family's template on a tokenizer of one token per byte, with merges for the letters' commonest pairs."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template, end, specials = FAMILIES[family]
    merges = [
        ("t", "h"),
        ("e", "r"),
        ("\u010a", "\u010a"),
        ("\u0120", "t"),
        ("i", "n"),
        ("\u0120", "a"),
        ("}", "\u010a"),
    ]
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|pad|>", end, *specials)])
    fast: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token=end
    )
    fast.chat_template = template
    return fast


def save(family: str, directory: Path) -> Path:
    """Write the tokenizer's files, as a model directory holds them."""
    chat_tokenizer(family).save_pretrained(directory)
    return directory
