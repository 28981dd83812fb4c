r"""The usual columns of Hugging Face's data sets: which are prompt and answer where no flag says so.

`rows.PromptReader` asks when `--input-key` is not given, and `launch.inputs` says in one line what was found. The first
row decides for the file, and a key that is given is never looked at here: such a column is taken as it is, while a
recognised answer is cut to what can be compared (`... #### 42` is 42).

::

    input [label]                                slime's own
    messages                                     a prompt, or a conversation whose last turn is the answer
    prompt, question, problem, query             with label, answer, ground_truth, solution, completion, response, ...
    instruction [input] with output or response  the input goes below the instruction
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DataError
from slime_core.plugins.boxed import last_boxed

CONVERSATIONS = ("messages", "conversation", "conversations")
PROMPTS = (*CONVERSATIONS, "prompt", "question", "problem", "query")
"""Columns of the prompt; two of them in a row are for the user to decide about."""
ANSWERS = ("label", "answer", "ground_truth", "solution", "completion", "output", "response", "target")
_AS_THEY_ARE = ("label", "ground_truth", "target")
"""Answers that are nothing but what is compared."""
_FINAL = re.compile(r"####\s*(.+?)\s*$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


@dataclass(frozen=True)
class Layout:
    """What was recognised."""

    prompt: str
    answer: str | None
    context: str | None = None
    """Column whose text goes below the prompt's."""
    label_key: str | None = None
    """Given by the user: taken as it is."""
    demonstrates: bool = False
    """Supervised: answers are trained on as they stand, and conversations keep their last turn."""
    form: str = ""
    """How the first row's answer is cut, for people."""

    def read(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """Prompt and label of a row; the prompt is not checked yet. Raises DataError for a row without the columns."""
        prompt, label = _column(row, self.prompt), None
        if self.context and row.get(self.context):
            prompt = f"{prompt}\n\n{row[self.context]}"
        if self.label_key or self.answer:
            label = _column(row, self.label_key or str(self.answer))
        if self.demonstrates:
            whole = [*prompt, *label] if isinstance(prompt, list) and isinstance(label, list) else None
            return (prompt, label) if whole is None else (whole, None)
        if self.label_key is None and self.answer not in _AS_THEY_ARE:
            label = _answer(label)
        if self.prompt in CONVERSATIONS and _is_messages(prompt) and prompt[-1].get("role") == "assistant":
            label = _answer(prompt[-1:]) if self.label_key is None and self.answer is None else label
            prompt = prompt[:-1]
        return prompt, label

    def __str__(self) -> str:
        prompt = f"prompt: {self.prompt!r}" + (f" and {self.context!r}" if self.context else "")
        turn = "its last turn" if self.prompt in CONVERSATIONS else "none"
        label = repr(self.label_key or self.answer) if self.label_key or self.answer else turn
        return f"{prompt}; {'answer' if self.demonstrates else 'label'}: {label}{self.form}"


def recognise(row: Mapping[str, Any], label_key: str | None = None, *, demonstrates: bool = False) -> Layout:
    """The layout of a row in which nobody has named the prompt.

    Args:
        row: The first one of the data.
        label_key: `--label-key`, where it is given.
        demonstrates: The run is supervised.

    Raises:
        DataError: None of its columns is known, or several are and mean different things.
    """
    seen = ", ".join(row) or "none"
    if "instruction" in row and any(name in row for name in ("output", "response")):
        prompt, context = "instruction", next((name for name in ("input", "context") if name in row), None)
    elif "input" in row:
        answer = "label" if "label" in row else None
        return Layout("input", None if label_key else answer, None, label_key, demonstrates)
    else:
        found, context = [name for name in PROMPTS if name in row], None
        if not found:
            raise DataError(f"no column 'input' (--input-key), nor one that is recognised; the row has: {seen}")
        if len(found) > 1:
            raise DataError(f"which column is the prompt? Type --input-key {' or '.join(found)}; the row has: {seen}")
        prompt = found[0]
    answer = None if label_key else _answer_column(row, prompt, demonstrates)
    form = "" if demonstrates or answer in (None, *_AS_THEY_ARE) else _form(row[str(answer)])
    return Layout(prompt, answer, context, label_key, demonstrates, form)


def _answer_column(row: Mapping[str, Any], prompt: str, demonstrates: bool) -> str | None:
    if demonstrates and prompt in CONVERSATIONS:
        return None
    found = [name for name in ANSWERS if name in row]
    if "solution" in found and "answer" in found:  # the working, and what it comes to
        found.remove("answer" if demonstrates else "solution")
    if len(found) > 1:
        names = " or ".join(found)
        raise DataError(f"which column is the answer? Type --label-key {names}; the row has: {', '.join(row)}")
    return found[0] if found else None


def _form(value: Any) -> str:
    if _is_messages(value):
        return ", the text of its last message"
    if isinstance(value, str) and _FINAL.search(value):
        return ", what follows ####"
    return ", what is in the last \\boxed{}" if isinstance(value, str) and last_boxed(value) is not None else ""


def _answer(value: Any) -> Any:
    """What can be compared: the last message's text, then what follows `####` or is in the last box, where there is."""
    if _is_messages(value):
        value = value[-1].get("content")
    if not isinstance(value, str):
        return value
    final = _FINAL.search(value)
    if final:
        return _THOUSANDS.sub("", final[1])
    boxed = last_boxed(value)
    return value if boxed is None else boxed


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, Mapping) for message in value)


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise DataError(f"no column {name!r}, which the first row has; the row has: {', '.join(row) or 'none'}")
    return row[name]
