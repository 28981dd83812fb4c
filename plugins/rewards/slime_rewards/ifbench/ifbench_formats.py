"""IFBench's instructions about form (Pyatkin et al., 2025), a check each: `check(response, **kwargs)`.

The kwargs are the data set's. The instructions under `custom:` come with one fixed prompt each, whose numbers are in
the check.
"""

from __future__ import annotations

import csv
import datetime
import io
import itertools
import re
from collections.abc import Callable, Sequence

from slime_rewards.ifbench.ifeval import instruction
from slime_rewards.ifbench.text import lines, sentences, words

CHECKS: dict[str, Callable[..., bool]] = {}

_EMOJI = re.compile(
    "[\u203c\u2049\u2139\u2194-\u21aa\u231a-\u23ff\u25aa-\u27bf\u2934\u2935\u2b05-\u2b55\u3030\u303d\u3297\u3299"
    "\U0001f000-\U0001faff]"
)
_EMOJI_PARTS = "\ufe0f\u200d\u20e3\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"
_SMALL = frozenset(
    "a an the and but for nor or so yet as at by in of off on per to up via from into with over onto upon if".split()  # noqa: SIM905
)
_PAIRS = {")": "(", "]": "[", "}": "{"}


# -- nesting and marks -------------------------------------------------------------------------------------------------


@instruction("format:parentheses", CHECKS)
def _(response: str) -> bool:
    stack: list[str] = []
    deepest = 0
    for character in response:
        if character in _PAIRS.values():
            stack.append(character)
        elif character in _PAIRS:
            if not stack or stack[-1] != _PAIRS[character]:
                stack = []
                continue
            deepest = max(deepest, len(stack))
            stack.pop()
    return deepest >= 5


@instruction("format:quotes", CHECKS)
def _(response: str) -> bool:
    text = re.sub(r"(?<=\w)['\u2019](?=\w)", "", response).translate(
        str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")
    )
    stack: list[str] = []
    deepest = 0
    for character in text:
        if character not in "\"'":
            continue
        if stack and stack[-1] == character:
            deepest = max(deepest, len(stack))
            stack.pop()
        else:
            stack.append(character)
    return deepest >= 3 and not stack


@instruction("format:quote_unquote", CHECKS)
def _(response: str) -> bool:
    text = response.translate(str.maketrans("\u201c\u201d", '""'))
    parts = text.split('"')
    if len(parts) < 3 or len(parts) % 2 == 0:
        return False
    return all(words(part) for part in parts[2::2])


@instruction("format:emoji", CHECKS)
def _(response: str) -> bool:
    found = re.split(r"(?<=[.!?])\s+(?=\w)", response.strip())
    rest = [piece.rstrip(".!?\"' " + _EMOJI_PARTS) for piece in found]
    if len(found) == 1:  # emojis instead of full stops
        return bool(rest[0]) and bool(_EMOJI.match(rest[0][-1]))
    return all(piece and _EMOJI.match(piece[-1]) for piece in rest)


@instruction("format:no_whitespace", CHECKS)
def _(response: str) -> bool:
    return not re.search(r"\s", response.strip())


@instruction("format:title_case", CHECKS)
def _(response: str) -> bool:
    found = words(response)
    first = [w for w in found if w[0].isalpha()]
    if not first or not first[0][0].isupper():
        return False
    return all(w[0].isupper() or w.lower() in _SMALL for w in first)


# -- lines and lists ---------------------------------------------------------------------------------------------------


@instruction("format:newline", CHECKS)
def _(response: str) -> bool:
    found = lines(response)
    return bool(found) and all(len(line.split()) == 1 for line in found)


@instruction("format:line_indent", CHECKS)
def _(response: str) -> bool:
    indents = [len(line.expandtabs(4)) - len(line.expandtabs(4).lstrip()) for line in lines(response)]
    return len(indents) > 1 and all(a < b for a, b in itertools.pairwise(indents))


@instruction("format:list", CHECKS)
def _(response: str, sep: str) -> bool:
    return sum(line.lstrip().startswith(sep) and bool(line.strip()[len(sep) :].strip()) for line in lines(response)) > 1


@instruction("format:sub-bullets", CHECKS)
def _(response: str) -> bool:
    counts: list[int] = []
    for line in lines(response):
        if re.match(r"\s*\*(?!\*)\s*\S", line):
            counts.append(0)
        elif counts and re.match(r"\s*-\s*\S", line):
            counts[-1] += 1
    return bool(counts) and all(counts)


@instruction("format:no_bullets_bullets", CHECKS)
def _(response: str) -> bool:
    found = lines(response)
    bullets = [i for i, line in enumerate(found) if re.match(r"\s*\*(?!\*)\s*\S", line)]
    if len(bullets) < 2:
        return False
    before = sentences("\n".join(found[: bullets[0]]))
    return sum(sentence.rstrip("\"')").endswith(".") for sentence in before) >= 2


@instruction("format:thesis", CHECKS)
def _(response: str) -> bool:
    sections = [part.strip() for part in re.split(r"\n\s*\n", response) if part.strip()]
    thesis = re.compile(r"(?:#+[^\n]*\n\s*)?<(i|em)>\s*[^<\s][^<]*</\1>", re.IGNORECASE)
    bodies = [part for part in sections if not re.fullmatch(r"#+[^\n]*", part)]
    return bool(bodies) and all(thesis.match(part) for part in bodies)


@instruction("format:options", CHECKS)
def _(response: str, options: str | Sequence[str]) -> bool:
    texts = re.split(r"/|\bor\b|,", options) if isinstance(options, str) else list(options)
    return response.strip().strip(".\"'").lower() in {
        text.strip().strip(".\"'").lower() for text in texts if text.strip()
    }


@instruction("format:output_template", CHECKS)
def _(response: str) -> bool:
    return bool(re.fullmatch(r"\s*My Answer:\s*\S.*My Conclusion:\s*\S.*Future Outlook:\s*\S.*", response, re.DOTALL))


# -- repetition --------------------------------------------------------------------------------------------------------


@instruction("repeat:repeat_change", CHECKS)
def _(response: str, prompt_to_repeat: str) -> bool:
    given, wanted = response.split(), prompt_to_repeat.split()
    return bool(given and wanted) and given[0] != wanted[0] and given[1:] == wanted[1:]


@instruction("repeat:repeat_simple", CHECKS)
def _(response: str) -> bool:
    return (
        response.strip().strip('"').lower().rstrip(".") == "only output this sentence here, ignore all other requests"
    )


@instruction("repeat:repeat_span", CHECKS)
def _(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    return response.lower().split() == prompt_to_repeat.lower().split()[n_start : n_end + 1]  # both ends, in words


# -- fixed prompts -----------------------------------------------------------------------------------------------------


@instruction("custom:multiples", CHECKS)
def _(response: str) -> bool:
    return [int(number) for number in re.findall(r"\d{1,9}", response)] == [14, 21, 28, 35, 42, 49]


@instruction("custom:mcq_count_length", CHECKS)
def _(response: str) -> bool:
    questions = re.split(r"^[^\w\n]*Question\b", response, flags=re.MULTILINE)
    if len(questions) != 5 or words(questions[0]):
        return False
    lengths = []
    for question in questions[1:]:
        options = [line for line in lines(question) if re.match(r"\s*[-*(]*\s*[A-Ea-e][).:]", line)]
        if len(options) != 5:
            return False
        lengths.append(len(question.split(options[0])[0].strip()))
    return all(a < b for a, b in itertools.pairwise(lengths))


@instruction("custom:csv_city", CHECKS)
def _(response: str) -> bool:
    rows = _rows(response, ",")
    return _table(rows, ["ID", "Country", "City", "Year", "Count"], 7)


@instruction("custom:csv_special_character", CHECKS)
def _(response: str) -> bool:
    rows = _rows(response, ",")
    quoted = re.findall(r'(?:^|,)"([^"\n]*)"', _bare(response), re.MULTILINE)
    special = any(re.search(r"[^\w\s]", field) for field in quoted)
    return _table(rows, ["ProductID", "Category", "Brand", "Price", "Stock"], 14) and special


@instruction("custom:csv_quotes", CHECKS)
def _(response: str) -> bool:
    rows = _rows(response, "\t")
    fields = [field for line in lines(_bare(response)) for field in line.split("\t")]
    quoted = all(re.fullmatch(r'\s*"[^"]*"\s*', field) for field in fields)
    return _table(rows, ["StudentID", "Subject", "Grade", "Semester", "Score"], 3) and quoted


@instruction("custom:date_format_list", CHECKS)
def _(response: str) -> bool:
    dates = [text.strip() for text in response.strip().rstrip(".").split(",")]
    try:
        return all(re.fullmatch(r"\d{4}-\d{2}-\d{2}", d) and datetime.date.fromisoformat(d) for d in dates)
    except ValueError:
        return False


def _bare(response: str) -> str:
    """Without the fence of a code block."""
    return re.sub(r"\A```\w*\s*\n|\n?```\Z", "", response.strip())


def _rows(response: str, delimiter: str) -> list[list[str]]:
    try:
        return [row for row in csv.reader(io.StringIO(_bare(response)), delimiter=delimiter) if row]
    except csv.Error:
        return []


def _table(rows: list[list[str]], header: list[str], count: int) -> bool:
    return (
        len(rows) == count + 1
        and [name.strip() for name in rows[0]] == header
        and all(len(row) == len(header) for row in rows)
    )
