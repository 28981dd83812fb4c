r"""The usual columns of Hugging Face's data sets: which are prompt and answer where no flag says so.

`rows.recognised` asks (entry-point group `slime.data`) when `--input-key` is not given, and `launch.prepare` prints
one line per data set (`in_words`). The first row decides for the file, and a key that is given is never looked at
here: such a column is taken as it is, while a recognised answer is cut to what can be compared (`... #### 42` is 42).
Names are compared without case, and with `_` for blanks; `a.b` is the key `b` of the objects in column `a`.

::

    input                                        slime's own
    messages                                     a prompt, or a conversation whose last turn is the answer
    prompt, question, problem, query             with one of the answers below
    instruction [input] with output or response  the input goes below the instruction
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from slime_core import Args, last_boxed
from slime_core.data.dataset import column, open_rows, split_path
from slime_core.data.rows import Columns, checked_prompt, recognised
from slime_core.errors import DataError

_CONVERSATIONS = ("messages", "conversation", "conversations")
_PROMPTS = (*_CONVERSATIONS, "prompt", "question", "problem", "query", "question_stem")
_FOR_REWARDS = ("reward_model.ground_truth", "ground_truth", "input_output", "test_list", "instruction_id_list", "test")
"""Answers that name nothing but what a reward compares with, or tests."""
_FINAL = (
    "answer", "expected_answer", "final_answer", "correct_answer", "reference_answer", "gold_answer", "golden_answers",
    "answers", "answerkey",
)  # fmt: skip
"""Answers without their working, mostly: they win over `_WORKED`."""
_OPEN = ("label", "target")
"""Answers, or verdicts on another column."""
_WORKED = ("solution", "completion", "output", "response", "generated_solution")
_AS_THEY_ARE = (*_OPEN, *_FOR_REWARDS)
_INNER = ("target", "text", "value")
"""Keys of answers that are objects: Search-R1's, SQuAD's, TriviaQA's."""
_BESIDE = ("context", "passage", "starter_code")
"""Text that belongs to the prompt of a row."""
_MARKED = re.compile(r"####\s*(.+?)\s*$")
_SAID = re.compile(
    r"(?:^|\n)\W*(?:(?:so|thus|hence|therefore),? )?the (?:final )?answer is:?[ *]*(\$?)(.+?)\1[ *]*\.?\s*$", re.I
)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")


@dataclass(frozen=True)
class Layout:
    """Columns that were recognised, by the names in the row."""

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
    choices: str | None = None
    """Column of the choices, which go below the prompt as A, B, C...; the label is the letter."""
    system: str | None = None
    """Column of the system message."""

    def read(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """Prompt and label of a row. Raises DataError if the row lacks the columns or a usable prompt."""
        prompt, label = checked_prompt(column(row, self.prompt), self.prompt), None
        choices = _choices(row.get(self.choices)) if self.choices else {}
        lettered = "\n".join(f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices.values()))
        for below in (row.get(self.context) if self.context else None, lettered):
            prompt = f"{prompt}\n\n{below}" if below and isinstance(prompt, str) else prompt
        if self.label_key or self.answer:
            label = column(row, self.label_key or str(self.answer))
        if self.demonstrates:
            whole = [*prompt, *label] if isinstance(prompt, list) and isinstance(label, list) else None
            return (prompt, label) if whole is None else (whole, None)
        if self.answer:
            label = _letter(_label(row, self.answer, label), choices)
        if self._converses and isinstance(prompt, list) and prompt[-1].get("role") == "assistant":
            label = label if self.label_key or self.answer else _compared(prompt[-1:])[0]
            prompt = prompt[:-1]
        return prompt, label

    @property
    def _converses(self) -> bool:
        return _plain(self.prompt) in _CONVERSATIONS

    def __str__(self) -> str:
        beside = [name for name in (self.context, self.choices) if name]
        prompt = f"prompt: {self.prompt!r}" + "".join(f" and {name!r}" for name in beside)
        turn = "its last turn" if self._converses else "none"
        label = repr(self.label_key or self.answer) if self.label_key or self.answer else turn
        system = f"; system message: {self.system!r}" if self.system else ""
        return f"{prompt}{system}; {'answer' if self.demonstrates else 'label'}: {label}{self.form}"


def recognise(row: Mapping[str, Any], label_key: str | None = None, *, demonstrates: bool = False) -> Layout:
    """Recognise the columns of a row without `--input-key`.

    Args:
        row: The first one of the data.
        label_key: `--label-key`, where it is given.
        demonstrates: The run is supervised.

    Raises:
        DataError: None of its columns is known, or several are and mean different things.
    """
    there = _names(row)

    def text_column(*names: str) -> str | None:
        return next((there[name] for name in names if isinstance(row.get(there.get(name, "")), str)), None)

    if "instruction" in there and any(name in there for name in ("output", "response")):
        prompt = there["instruction"]
        beside: tuple[str, ...] = ("input", "context")
    else:
        prompt, beside = _prompt_column(row, there), _BESIDE
    choices = next((there[name] for name in ("choices", "options") if _choices(row.get(there.get(name, "")))), None)
    if not isinstance(row[prompt], str):
        beside, choices = (), None
    answer, form = None, ""
    if not label_key and not (demonstrates and _plain(prompt) in _CONVERSATIONS):
        answer = _answer_column(row, there, prompt, demonstrates)
    if answer and not demonstrates and _plain(answer) not in _AS_THEY_ARE:
        form = _compared(column(row, answer))[1]
    system = text_column("system", "system_prompt")
    return Layout(prompt, answer, text_column(*beside), label_key, demonstrates, form, choices, system)


def in_words(args: Args) -> list[str]:
    """Return a line per data set with recognised columns; skip missing files and data with only an `input` column."""
    sets = []
    if args.prompt_data and args.rollout_global_dataset and not args.data_source_path:
        sets.append((args.prompt_data, Columns.of_run(args), "--prompt-data"))
    sets += [(d.path, Columns.of_eval(d, args), f"evaluation data set {d.name!r}:") for d in args.eval_datasets]
    lines = []
    for spec, columns, origin in sets:
        if columns.input is not None or not split_path(spec)[0].is_file():
            continue
        with suppress(DataError):  # the data source reports unreadable data, if it is ever read
            rows = open_rows(spec, origin, stream=split_path(spec)[1] == slice(None))  # the first rows tell
            with closing(rows):
                layout = recognised(rows, columns)
            if layout is not None and (layout.prompt != "input" or layout.answer):
                lines.append(f"columns of {spec}: {layout}")
    return lines


def _names(row: Mapping[str, Any]) -> dict[str, str]:
    """Plain name -> the row's name of each column, and of each key of columns that are objects."""
    there = {_plain(name): name for name in row} | {name: name for name in row}
    inner = {f"{plain}.{key}": f"{name}.{key}" for plain, name in there.items() for key in _keys(row[name])}
    return inner | there


def _prompt_column(row: Mapping[str, Any], there: Mapping[str, str]) -> str:
    """The prompt's column: of several the one that says what all the others say."""
    seen = ", ".join(row) or "none"
    found = [there[name] for name in (("input",) if "input" in there else _PROMPTS) if name in there]
    if not found:
        raise DataError(f"no column 'input' (--input-key), nor one that is recognised; the row has: {seen}")
    texts = {name: _asked(row[name]) for name in found}
    whole = [name for name in found if all(text in texts[name] for text in texts.values())]
    if not whole:
        raise DataError(f"which column is the prompt? Type --input-key {' or '.join(found)}; the row has: {seen}")
    return whole[0]


def _answer_column(row: Mapping[str, Any], there: Mapping[str, str], prompt: str, demonstrates: bool) -> str | None:
    """The answer's column, where there is one; final answers win over their working, but for a supervised run."""
    if _plain(prompt) == "input" and "label" in there:
        return there["label"]
    others = {
        name: there[name] for name in there if there[name] != prompt and (name != "test" or "entry_point" in there)
    }
    final, opened, worked = (
        [others[name] for name in names if name in others] for names in ((*_FOR_REWARDS, *_FINAL), _OPEN, _WORKED)
    )
    if demonstrates:
        found = [*opened, *(worked or final)]
    else:
        found = [*final, *opened] if final else [*opened, *worked]
        labels = [_label(row, name, column(row, name)) for name in found]
        found = found[: 1 if all(label == labels[0] for label in labels) else None]
    if len(found) > 1:
        names = " or ".join(found)
        raise DataError(f"which column is the answer? Type --label-key {names}; the row has: {', '.join(row)}")
    return found[0] if found else None


def _label(row: Mapping[str, Any], name: str, value: Any) -> Any:
    """The answer in column `name`, as rewards take it."""
    plain = _plain(name)
    if plain == "instruction_id_list":  # IFEval
        return {"instruction_id_list": value, "kwargs": row.get("kwargs")}
    if plain == "test" and isinstance(value, str):  # HumanEval
        return f"{value}\ncheck({row.get('entry_point')})\n"
    key = next((key for key in _INNER if key in _keys(value)), None)
    if key is not None:
        value = value[key]
    if (key is not None or plain in _FINAL) and isinstance(value, list) and all(isinstance(v, str) for v in value):
        different = list(dict.fromkeys(value))
        value = different if len(different) > 1 else "".join(different)
    return value if plain in _AS_THEY_ARE else _compared(value)[0]


def _letter(value: Any, choices: Mapping[str, str]) -> Any:
    """The letter of the choice that `value` numbers (from 0), names or spells; `value` where it does none of them."""
    places = [*choices].index, [*choices.values()].index
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return ascii_uppercase[value]
    for known, place in zip(([*choices], [*choices.values()]), places):
        if value in known:
            return ascii_uppercase[place(value)]
    return value


def _choices(value: Any) -> dict[str, str]:
    """Name -> text of choices: a list of texts, `{"label": [...], "text": [...]}` or `{"A": ..., "B": ...}`."""
    if isinstance(value, list):
        value = {"text": value}
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        value = dict(zip(value.get("label") or ascii_uppercase, value["text"]))
    right = isinstance(value, Mapping) and 0 < len(value) <= len(ascii_uppercase)
    return dict(value) if right and all(isinstance(text, str) for text in value.values()) else {}


def _compared(value: Any) -> tuple[Any, str]:
    """Return the part of an answer that can be compared, and how it was found.

    Of messages it is the last one's text; of text what follows `####` (GSM8K), is in the last box (MATH), or follows
    `The answer is:` at the end (MetaMathQA); of all else it is the value.
    """
    form = ""
    if isinstance(value, list) and value and all(isinstance(message, Mapping) for message in value):
        value, form = value[-1].get("content"), ", the text of its last message"
    if not isinstance(value, str):
        return value, form
    if marked := _MARKED.search(value):
        return _THOUSANDS.sub("", marked[1]), form or ", what follows ####"
    boxed = last_boxed(value)
    if boxed is not None:
        return boxed, form or ", what is in the last \\boxed{}"
    said = _SAID.search(value)
    return (said[2], form or ", what follows 'The answer is'") if said else (value, form)


def _asked(value: Any) -> str:
    """Return the text of a prompt; of messages, the text of all but the assistant's."""
    if not isinstance(value, list):
        return value.strip() if isinstance(value, str) else ""
    return "\n".join(
        str(m.get("content")) for m in checked_prompt(value, "") if isinstance(m, dict) and m.get("role") != "assistant"
    )


def _plain(name: str) -> str:
    return "_".join(name.casefold().split())


def _keys(value: Any) -> Collection[str]:
    return value.keys() if isinstance(value, Mapping) else ()
