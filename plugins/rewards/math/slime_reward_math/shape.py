r"""An answer's shape: a list, a set, a tuple or an interval, a union, a relation, or one value.

`same_answer` compares two canonical texts part by part. A shape equals only shapes of its own kind, in the order of its
kind, so that a value is compared only if both texts give it. A relation is reduced to its value if the other text has
no relation: `x_1 = 12` answers 12. A list that is not spelt out (`1, 2, \dots, n`) equals only lists of the same
spelling.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from latex2sympy2_extended import latex2sympy

from slime_core import same_number
from slime_reward_math.values import equal_values, is_closed, proportional

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\\]", re.DOTALL)
_OPENING = {"(", "[", "{", "\\{", "\\lfloor", "\\lceil", "\\langle", "\\begin"}
_CLOSING = {")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle", "\\end"}
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "\\leq": "<=", "\\geq": ">=", "\\neq": "!=", "\\in": "in", "\\equiv": "=",
    "\\approx": "~", "\\sim": "~", "\\simeq": "~", "\\cong": "~", "\\to": "to", "\\ll": "<<", "\\gg": ">>",
    "\\notin": "not in", "\\subset": "subset", "\\subseteq": "subset",
}  # fmt: skip
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_NAME = re.compile(
    r"(?:\\[A-Za-z]+|[A-Za-z])'*(?:\{[^{}]*\})?(?:_(?:\{[^{}]*\}|\w))?(?:\^\{?[*']+\}?)?(?:\([^()=]*\))?"
    r"|(?:\\text\{[^{}]*\}|[A-Za-z ]+)(?:_(?:\{[^{}]*\}|\w))?(?:\([^()=]*\))?|\|[A-Za-z]+\||\\angle ?[A-Za-z]+"
)
_FUNCTION_OF_X = re.compile(r"[A-Za-z]\(x\)")
_CHOICE = re.compile(r"\(([A-H])\)(?=[\d$-]|\\(?:frac|sqrt|text|pi)(?![A-Za-z]))(.+)")
_LETTER = re.compile(r"\(?[A-H]\)?")
_COLUMN = re.compile(r"\\begin\{[bp]matrix\}([^&]*)\\end\{[bp]matrix\}")
_FRENCH = re.compile(r"^(\])([^\[\]]*)([\[\])])$|^([\[(])([^\[\]]*)(\[)$")
_TIME = re.compile(r"0?(\d{1,2}:[0-5]\d)")
_MODULO = re.compile(r"\\(?:pmod|bmod|mod|pod)\s*(?:\{([^{}]*)\}|\(?(\w+)\)?)|\(\\?(?:mod|text\{mod\})\s*(\w+)\)")
_NUMERAL = re.compile(r"([-+]?)([0-9A-Za-z]*\d[0-9A-Za-z]*(?:\.\d+)?)_\{(?:\\text\{)?(\w+)\}?\}|\((\w+)\)_\{(\w+)\}")
_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "sixteen": "16",
}  # fmt: skip
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        (
            "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
            "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
        )
    )
}  # fmt: skip
_WORDS = re.compile(r"(?:\\text\{[^{}]*\}|[A-Za-z' -])+")
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{2,3}")
"""Small letters that are not a word, since they have no vowel: `xy` is `yx`, and `on` is not `no`."""
_APART = re.compile(r"\d \d")
_AND = re.compile(r"(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{ ?per ?cent ?\}| per ?cent)$")
_DEGREES = re.compile(r"\^\{\\circ\}(?:\s*[CF])?$|\s*\\?(?:text\{ ?)?degrees?(?: ?\})?$")
_ANGLE_OF = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
"""Functions whose degrees are part of the value."""
_DENIED = re.compile(r"\b(?:or|and|not|is|but|wrong|incorrect|false|no)\b", re.IGNORECASE)
_OF_SETS = re.compile(r"\\(?:cup|cap|setminus|mathbb|emptyset)(?![A-Za-z])")
_UNIT = re.compile(
    r"(?<=[\d}) ])\s*(?:\\text\{([^{}]*)\}|(?<![A-Za-z\\])(sq(?:uare)? ?\w+|cubic ?\w+|[A-Za-z]+(?:/[A-Za-z]+)?))"
    r"(?:\^\{?([23])\}?)?$"
)
_UNITS = {
    name: group.split()[0]
    for group in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
        "in inch inche inches", "ft foot feet", "yd yard", "mi mile", "s sec second", "min minute", "h hr hour",
        "day", "week", "month", "year yr", "g gram", "kg kilogram", "mg milligram", "lb pound", "l liter litre",
        "ml milliliter", "cent", "dollar usd", "euro eur", "yen jpy", "unit", "mph", "kmh km/h kph", "m/s",
        "degree deg", "hectare", "gallon", "dozen", "point", "people person", "way", "time",
        "student", "apple", "coin", "ticket", "book", "ball",
    )
    for name in group.split()
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """An answer in parts."""

    kind: str
    """Kind: one, list, set, tuple, union, relation, such that, or as spelt."""
    text: str
    parts: tuple[Shape, ...] = ()
    marks: tuple[str, ...] = ()
    """The brackets of a tuple, or the signs between the sides of a relation."""


def same_answer(answer: str, label: str) -> bool:
    """Return True if both have the same shape and equal parts.

    An answer to a choice, `(B) 17`, is also its letter alone or its value alone.
    """
    ours, theirs = _CHOICE.fullmatch(answer), _CHOICE.fullmatch(label)
    if ours and theirs and ours[1] != theirs[1]:
        return False
    if (ours or theirs) and _LETTER.fullmatch(label if ours else answer):
        return (ours[1] if ours else answer) == (theirs[1] if theirs else label).strip("()")
    answer, label = (found[2] if found else text for found, text in ((ours, answer), (theirs, label)))
    return _same(shape_of(answer), shape_of(label))


@functools.lru_cache(maxsize=4096)
def shape_of(text: str) -> Shape:
    """Return the shape of a canonical text."""
    text = _FRENCH.sub(_opened, text.strip(" .,;"))
    if "\\dots" in text:
        return Shape("as spelt", text)
    words = _AND.split(text)
    if len(words) > 1:
        intervals = [_interval(shape_of(word)) for word in words] if "or" in text else [None]
        if all(interval is not None and interval.kind == "tuple" for interval in intervals):
            return Shape("union", text, tuple(interval for interval in intervals if interval is not None))
        if (both := _intersection([shape_of(word) for word in words])) is not None:
            return both
        text = ",".join(words)
    for separator in (";", ","):
        parts, found = _split(text, {separator: separator})
        if found:
            return _listed(text, [part for part in parts if part])
    sides, signs = _split(text, _RELATIONS)
    if signs:
        signs = [_RELATIONS[sign] for sign in signs]
        if not sides[0].strip() and signs == ["~"]:
            return shape_of(sides[1])
        return Shape("relation", text, tuple(map(shape_of, sides)), tuple(signs))
    if len(parts := _split(text, {":"})[0]) > 2:
        return Shape("tuple", text, tuple(map(shape_of, parts)), (":",))
    if len(parts := _split(text, {"\\cup"})[0]) > 1:
        return Shape("union", text, tuple(map(shape_of, parts)))
    return _bracketed(text) or _both_signs(text) or Shape("one", text)


def _opened(match: re.Match[str]) -> str:
    """Rewrite `]1, 2[` as `(1, 2)`."""
    first, inner, last = (group for group in match.groups() if group is not None)
    return f"{first.replace(']', '(')}{inner}{last.replace('[', ')')}"


def _listed(text: str, parts: Sequence[str]) -> Shape:
    """Return a list; a part that is a list (`1 \\pm 2`) is replaced by its members, `x = 1, 2` by `x = 1, x = 2`."""
    shapes = [member for part in parts for member in _members(shape_of(part))]
    return shapes[0] if len(shapes) == 1 else Shape("list", text, tuple(shapes))


def _members(shape: Shape) -> tuple[Shape, ...]:
    return shape.parts if shape.kind == "list" else (shape,)


def _split(text: str, separators: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the parts between separators outside all brackets, and these separators."""
    parts, found, depth = [""], [], 0
    for token in _TOKEN.findall(text):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth <= 0 and token in separators:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], found


def _bracketed(text: str) -> Shape | None:
    """Parse a text that a single pair of brackets encloses; return None for other texts."""
    tokens = _TOKEN.findall(text)
    if len(tokens) < 3:
        return None
    first, last = tokens[0], tokens[-1]
    if first not in ("(", "[", "{", "\\{", "\\langle") or last not in (")", "]", "}", "\\}", "\\rangle"):
        return None
    depth = 0
    for token in tokens[:-1]:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0:
            return None
    inner = "".join(tokens[1:-1]).strip()
    if first == "{":
        return shape_of(inner)
    if first == "\\{":
        for bar in (":", "|"):
            sides, bars = _split(inner, {bar})
            if len(bars) == 1:
                name, condition = map(shape_of, sides)
                reals = name.marks == ("in",) and name.parts[1].text == "\\mathbb{R}"
                interval = _interval(condition) if _is_name(name) or reals else None
                if interval is not None and _middle(condition).text == (name.parts[0] if reals else name).text:
                    return interval
                return Shape("such that", text, (name, condition))
        members = _members(shape_of(inner))
        return Shape("set", text, members)
    parts = _split(inner, {","})[0]
    if len(parts) == 1:
        parts = _split(inner, {";"})[0]
    if len(parts) == 1:
        is_round = first + last == "()" or inner.startswith("\\begin")
        return shape_of(inner) if is_round else Shape("tuple", text, (shape_of(inner),), (first, last))
    marks = ("(", ")") if first == "\\langle" else (first, last)
    return Shape("tuple", text, tuple(map(shape_of, parts)), marks)


def _both_signs(text: str) -> Shape | None:
    r"""Rewrite `1 \pm x` as `1 + x, 1 - x`."""
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        return None
    signs = {"\\pm": "+-", "\\mp": "-+"}
    both = [
        "".join(signs[token][index] if token in signs else token for token in _TOKEN.findall(text)).lstrip("+")
        for index in (0, 1)
    ]
    return Shape("list", text, tuple(map(shape_of, both)))


def _same(answer: Shape, label: Shape) -> bool:
    if _spelt(answer.text) == _spelt(label.text):
        return bool(label.text)
    if "as spelt" in (answer.kind, label.kind) or not answer.text or not label.text:
        return False
    if answer.kind == label.kind == "relation":
        return _same_relation(answer, label)
    if label.kind == "relation":
        return _answers_relation(answer, label)
    if answer.kind == "relation":
        return _relation_answers(answer, label)
    return _same_members(answer, label) or _same_sets(answer.text, label.text)


def _same_members(answer: Shape, label: Shape) -> bool:
    """Compare the parts of shapes without relations, in the order that matters for their kinds."""
    kinds = {answer.kind, label.kind}
    if kinds == {"one"}:
        return _same_one(answer.text, label.text)
    if kinds == {"tuple"} and answer.marks == label.marks == (":",):
        return _same_ratio(answer.parts, label.parts)
    if kinds in ({"tuple"}, {"such that"}):
        return answer.marks == label.marks and _in_order(answer.parts, label.parts)
    if kinds in ({"list"}, {"list", "set"}):
        if {len(_names(answer)) > 1, len(_names(label)) > 1} == {True, False} and _names(answer) and _names(label):
            return False  # `x = 1, y = 2` for `x = 1, x = 2`
        return _in_any_order(_values(answer.parts), _values(label.parts))
    if kinds == {"set"}:
        return _in_any_order(_without_doubles(answer.parts), _without_doubles(label.parts))
    if kinds == {"list", "tuple"}:
        return (
            ("(", "]") not in (marks := (answer.marks, label.marks))
            and ("[", ")") not in marks
            and _in_order(_coordinates(answer), _coordinates(label))
        )
    if kinds == {"set", "one"}:
        one, other = (answer, label) if answer.kind == "set" else (label, answer)
        member = one.parts[0] if len(one.parts) == 1 else None
        return member is not None and "\\emptyset" not in (member.text, other.text) and _same(member, other)
    if kinds == {"tuple", "one"}:
        pair, one = (answer, label) if answer.kind == "tuple" else (label, answer)
        column = _COLUMN.fullmatch(one.text)
        parts = column[1].split("\\\\") if column else []
        return pair.marks == ("(", ")") and _in_order(pair.parts, [shape_of(part) for part in parts])
    return kinds == {"union"} and _in_any_order(answer.parts, label.parts)


def _spelt(text: str) -> str:
    return re.sub(r" (?!\d)|(?<!\d) ", "", text)


def _in_order(answers: Sequence[Shape], labels: Sequence[Shape]) -> bool:
    return len(answers) == len(labels) and all(map(_same, answers, labels))


def _in_any_order(answers: Sequence[Shape], labels: Sequence[Shape]) -> bool:
    left = list(labels)
    if len(answers) != len(left):
        return False
    for answer in answers:
        found = next((place for place, label in enumerate(left) if _same(answer, label)), None)
        if found is None:
            return False
        left.pop(found)
    return True


def _without_doubles(parts: Sequence[Shape]) -> list[Shape]:
    kept: list[Shape] = []
    for part in parts:
        if not any(_same(part, other) for other in kept):
            kept.append(part)
    return kept


def _values(parts: Sequence[Shape]) -> Sequence[Shape]:
    """Return the values in `x = 1, x = 2` or `x = 1, 2`: 1 and 2. Equations of several names are not changed."""
    names = {_spelt(part.parts[0].text) for part in parts if _is_assignment(part)}
    if len(names) != 1 or any(part.kind == "relation" and not _is_assignment(part) for part in parts):
        return parts
    return [part.parts[-1] if part.kind == "relation" else part for part in parts]


def _names(shape: Shape) -> set[str]:
    """Return the names that a list assigns, without their subscripts."""
    return {_spelt(part.parts[0].text).partition("_")[0] for part in shape.parts if _is_assignment(part)}


def _same_ratio(answers: Sequence[Shape], labels: Sequence[Shape]) -> bool:
    """Compare ratios of three and more numbers: `2:4:6` is `1:2:3`."""
    if len(answers) != len(labels):
        return False
    first, expected = answers[0].text, labels[0].text
    return all(
        _equal(f"({part.text})\\cdot({expected})", f"({other.text})\\cdot({first})")
        for part, other in zip(answers, labels)
    )


def _coordinates(shape: Shape) -> Sequence[Shape]:
    """Return the members of a tuple, or of `x = 1, y = 2` by name."""
    if shape.kind == "list" and all(map(_is_assignment, shape.parts)):
        named = {_spelt(part.parts[0].text): part.parts[-1] for part in shape.parts}
        return [named[name] for name in sorted(named)] if len(named) == len(shape.parts) else shape.parts
    return shape.parts


def _is_assignment(shape: Shape) -> bool:
    return shape.kind == "relation" and set(shape.marks) <= {"=", "~", "in"} and _is_name(shape.parts[0])


def _is_name(shape: Shape) -> bool:
    return shape.kind == "one" and bool(_NAME.fullmatch(shape.text)) and not is_function(shape.text)


def is_function(text: str) -> bool:
    r"""Return True for `\pi`, which is not a name."""
    return text in ("\\pi", "\\infty", "\\emptyset") or text.startswith(("\\sqrt", "\\frac", "\\mathbb"))


def _value_of(relation: Shape) -> Shape | None:
    """Return the side of an equation that is its value; None if its numbers differ, or if it has no such side."""
    if set(relation.marks) - {"=", "~", "in"}:
        return None
    sides = [side for side in relation.parts if not _is_name(side)]
    if not sides:
        return relation.parts[-1]
    value = relation.parts[0] if _is_name(relation.parts[-1]) and len(relation.parts) == 2 else relation.parts[-1]
    if "in" in relation.marks:
        return value if len(relation.parts) == 2 else None
    if _MODULO.search(value.text):
        return Shape("one", _MODULO.sub("", value.text).strip())
    for side in sides:
        if side is value or side.kind != "one" or value.kind != "one" or "~" in relation.marks:
            continue
        if is_closed(_as_value(side.text)) and is_closed(_as_value(value.text)) and not _same(side, value):
            return None
    return value


def _relation_answers(answer: Shape, label: Shape) -> bool:
    """Return whether an equation answers with its value, or an inequality with its interval."""
    if (interval := _interval(answer)) is not None:
        return _same(interval, label)
    value = _value_of(answer)
    return value is not None and _same(value, label)


def _answers_relation(answer: Shape, label: Shape) -> bool:
    """Return whether a value answers an equation whose other side is a name."""
    if (interval := _interval(label)) is not None:
        return _same(answer, interval)
    value = _value_of(label) if _is_name(label.parts[0]) or _is_name(label.parts[-1]) else None
    return value is not None and _same(answer, value)


def _same_relation(answer: Shape, label: Shape) -> bool:
    if answer.marks == label.marks and _in_order(answer.parts, label.parts):
        return True
    turned = tuple(_TURNED.get(mark, mark) for mark in reversed(answer.marks))
    if turned == label.marks and _in_order(answer.parts[::-1], label.parts):
        return True
    ours, theirs = _interval(answer), _interval(label)
    if ours is not None and theirs is not None:
        return _spelt(_middle(answer).text) == _spelt(_middle(label).text) and _same(ours, theirs)
    if set(answer.marks) == set(label.marks) == {"="} and _is_name(answer.parts[0]) and _is_name(label.parts[0]):
        names = {_spelt(answer.parts[0].text), _spelt(label.parts[0].text)}
        if len(names) > 1 and not ("y" in names and any(map(_FUNCTION_OF_X.fullmatch, names))):
            return len(answer.marks) == len(label.marks) == 1 and _one_equation(answer, label)
        given, expected = _value_of(answer), _value_of(label)
        return given is not None and expected is not None and _same(given, expected)
    return len(answer.marks) == len(label.marks) == 1 and _one_equation(answer, label)


def _one_equation(answer: Shape, label: Shape) -> bool:
    """Return whether two equations or inequalities are multiples of each other."""
    one, other = [f"({shape.parts[0].text})-({shape.parts[1].text})" for shape in (answer, label)]
    ratio = proportional(one, other)
    if not ratio:
        return False
    if answer.marks == label.marks and answer.marks[0] in ("=", "!="):
        return True
    return label.marks[0] == (answer.marks[0] if ratio > 0 else _TURNED.get(answer.marks[0]))


def _middle(relation: Shape) -> Shape:
    return next(side for side in relation.parts if _is_name(side))


def _interval(relation: Shape) -> Shape | None:
    r"""Rewrite `1 < x \leq 2` as `(1,2]` and `x > 3` as `(3,\infty)`; return None for other relations."""
    signs, sides = relation.marks, relation.parts
    if signs == ("in",) and _is_name(sides[0]):
        return sides[1]
    if signs == ("!=",) and _is_name(sides[0]) and not _is_name(sides[1]):
        return shape_of(f"\\mathbb{{R}}\\setminus\\{{{sides[1].text}\\}}")
    if not signs or len(signs) > 2 or any(sign not in _TURNED for sign in signs):
        return None
    if signs[0][0] == ">":
        signs, sides = tuple(_TURNED[sign] for sign in reversed(signs)), sides[::-1]
    if any(sign[0] != "<" for sign in signs):
        return None
    brackets = {"<": ("(", ")"), "<=": ("[", "]")}
    if len(signs) == 2 and _is_name(sides[1]):
        low, high = sides[0], sides[2]
        marks = brackets[signs[0]][0], brackets[signs[1]][1]
    elif len(signs) == 1 and _is_name(sides[0]) and not _is_name(sides[1]):
        low, high, marks = Shape("one", "-\\infty"), sides[1], ("(", brackets[signs[0]][1])
    elif len(signs) == 1 and _is_name(sides[1]) and not _is_name(sides[0]):
        low, high, marks = sides[0], Shape("one", "\\infty"), (brackets[signs[0]][0], ")")
    else:
        return None
    return Shape("tuple", relation.text, (low, high), marks)


def _intersection(relations: Sequence[Shape]) -> Shape | None:
    r"""Rewrite `x \geq 2, x < 7` as `[2,7)`; return None unless the one bounds a name below and the other above."""
    intervals = [_interval(relation) for relation in relations]
    if len(intervals) != 2 or any(relation.kind != "relation" for relation in relations):
        return None
    if _middle(relations[0]).text != _middle(relations[1]).text:
        return None
    low, high = sorted(intervals, key=lambda interval: bool(interval and interval.parts[0].text == "-\\infty"))
    if low is None or high is None or [part.text for part in (low.parts[-1], high.parts[0])] != ["\\infty", "-\\infty"]:
        return None
    return Shape("tuple", low.text + high.text, (low.parts[0], high.parts[1]), (low.marks[0], high.marks[1]))


def _same_one(answer: str, label: str) -> bool:
    """Compare two values: exactly if both are numbers, by spelling if both are words, else as expressions."""
    answer, label = _in_digits(answer), _in_digits(label)
    same = same_number(answer, label)
    if same is not None:
        return same
    if _WORDS.fullmatch(answer) and _WORDS.fullmatch(label):
        ours, theirs = _word(answer), _word(label)
        products = _PRODUCT.fullmatch(answer) and _PRODUCT.fullmatch(label)
        return ours == theirs or bool(products and sorted(answer) == sorted(label))
    numerals = _NUMERAL.fullmatch(answer), _NUMERAL.fullmatch(label)
    if any(numerals):
        return _same_numeral(answer, label)
    times = _TIME.fullmatch(answer), _TIME.fullmatch(label)
    if times[0] and times[1]:
        return times[0][1] == times[1][1]
    if _APART.search(answer) or _APART.search(label):
        return False
    modulus, expected = _modulus(answer), _modulus(label)
    if modulus and expected and modulus != expected:
        return False
    answer, label = (_MODULO.sub("", text).strip() for text in (answer, label))
    return _same_measure(answer, label)


def _in_digits(text: str) -> str:
    """Return `7` for the word seven, and other texts unchanged."""
    return _NUMBERS.get(_word(text), text)


def _word(text: str) -> str:
    plain = re.sub(r"\\text|[{}]", "", text).strip().casefold()
    return re.sub(r"\s", "", re.sub(r"^(?:an?|the) (?=\w\w)", "", plain))


def _modulus(text: str) -> str | None:
    found = _MODULO.search(text)
    return next(group for group in found.groups() if group) if found else None


def _same_numeral(answer: str, label: str) -> bool:
    """Compare digits in one base. An answer may omit the label's base, and may add base 10 if the label has none."""
    (given, base), (expected, expected_base) = _numeral(answer), _numeral(label)
    if given is None or given != expected:
        return False
    return base in (expected_base, None) or (base == "10" and expected_base is None)


def _numeral(text: str) -> tuple[str | None, str | None]:
    found = _NUMERAL.fullmatch(text)
    if found:
        digits, base = (found[1] or "") + (found[2] or found[4]), (found[3] or found[5]).lower()
        return digits.lstrip("+").lstrip("0").upper(), _BASES.get(base, base)
    return (text.lstrip("0").upper(), None) if re.fullmatch(r"-?\w+(?:\.\d+)?", text) else (None, None)


def _same_measure(answer: str, label: str) -> bool:
    """Compare values with percent signs, degrees and units, which an answer may omit or add."""
    for mark in (_PERCENT,) if _ANGLE_OF.search(answer + label) else (_PERCENT, _DEGREES):
        ours, theirs = mark.search(answer), mark.search(label)
        if not (ours or theirs):
            continue
        given, expected = mark.sub("", answer), mark.sub("", label)
        if _same_quantity(given, expected):
            return True
        marked, other = (given, expected) if ours else (expected, given)
        if (ours and theirs) or (mark is _DEGREES and "\\pi" not in other):
            return False
        factor = r"\frac{1}{100}" if mark is _PERCENT else r"\frac{\pi}{180}"
        return _same_quantity(f"({marked})\\cdot{factor}", other)
    return _same_quantity(answer, label)


def _same_quantity(answer: str, label: str) -> bool:
    (given, unit), (expected, expected_unit) = _measured(answer), _measured(label)
    if unit and expected_unit and unit != expected_unit:
        return False
    if given == answer and expected == label:
        return _equal(answer, label)
    return _equal(given, expected) or (not (unit and expected_unit) and _equal(answer, label))


def _measured(text: str) -> tuple[str, str | None]:
    r"""Return the value without its unit, and the unit; `5\text{ is wrong}` has no unit."""
    found = _UNIT.search(text)
    if not found:
        return text, None
    name = (found[1] if found[1] is not None else found[2]).strip().lower()
    if found[1] is None and name.rstrip("s") not in _UNITS and name not in _UNITS and " " not in name:
        return text, None
    if _DENIED.search(name) or not text[: found.start()].strip():
        return text, None
    power = found[3] or ("2" if name.startswith("sq") else "3" if name.startswith("cubic") else "")
    name = re.sub(r"^(?:square|sq|cubic) ?", "", name)
    known = _unit(re.sub(r" ?(?:/| per ) ?", "/", name))
    return text[: found.start()].strip(), known + power


def _unit(name: str) -> str:
    """Return the common name of a unit, or of a quotient of two."""
    known = _UNITS.get(name) or _UNITS.get(name.rstrip("s"))
    if known or "/" not in name:
        return known or name
    quotient = "/".join(map(_unit, name.split("/")))
    return _UNITS.get(quotient, quotient)


def _equal(answer: str, label: str) -> bool:
    same = same_number(answer, label)
    if same is not None:
        return same
    return _spelt(answer) == _spelt(label) or equal_values(_as_value(answer), _as_value(label))


def _as_value(text: str) -> str:
    """Rewrite a text for sympy's grammar: numerals with a base become the numbers that they represent."""
    return re.sub(r"(?<![\w}])(\d+)_\{(\d+)\}", _decimal, text)


def _decimal(match: re.Match[str]) -> str:
    try:
        return str(int(match[1], int(match[2])))
    except ValueError:
        return "\\text{no numeral}"


def _same_sets(answer: str, label: str) -> bool:
    """Compare unions, and the reals without points, as sympy's sets."""
    if not (_OF_SETS.search(answer) or _OF_SETS.search(label)):
        return False
    try:
        ours, theirs = (latex2sympy(text, is_real=True, normalization_config=None) for text in (answer, label))
        return bool(ours == theirs or ours.symmetric_difference(theirs).is_empty)
    except Exception:  # whatever a grammar or sympy makes of a model's text
        return False
