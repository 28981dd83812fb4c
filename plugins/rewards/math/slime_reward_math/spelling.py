r"""Convert an answer as people and models type it to one LaTeX spelling, which `shape` parses and `values` evaluates.

`\dfrac12`, `1/2` as `\u00bd`, `\mathrm{e}`, `\varnothing`, `0.\overline{3}`, `sqrt(2)`, `\ldots`, currency and font
commands each become one form. Nothing is evaluated, and a text already in this spelling does not change.
"""

from __future__ import annotations

import re
import unicodedata

FUNCTIONS = (
    "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "ln",
    "log", "lg", "exp", "sqrt", "gcd", "lcm", "max", "min", "det", "lim",
)  # fmt: skip
_GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "pi", "rho", "sigma", "phi", "omega")
_CHARACTERS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ",
    "\u00f7": r"\div ", "\u2264": r"\leq ", "\u2265": r"\geq ", "\u2260": r"\neq ", "\u2248": r"\approx ",
    "\u2261": r"\equiv ", "\u221e": r"\infty ", "\u221a": r"\sqrt", "\u00b0": r"^\circ ", "\u2205": r"\emptyset ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b1": r"\pm ", "\u2213": r"\mp ",
    "\u2026": r"\dots ", "\u22ef": r"\dots ", "\u2223": "|", "\u211d": r"\mathbb{R}", "\u2124": r"\mathbb{Z}",
    "\u2115": r"\mathbb{N}", "\u211a": r"\mathbb{Q}", "\u2102": r"\mathbb{C}", "\u2216": "\\setminus ",
    "\u2032": "'", "\u2044": "/", "\u2019": "'", "\u201c": "", "\u201d": "", "\u20ac": r"\euro ",
    "\u00a3": r"\pounds ", "\u00a5": r"\yen ", "\u00a2": r"\text{ cent}",
    "\u2220": r"\angle ", "\u2192": r"\to ", "\u2211": r"\sum ", "\u222b": r"\int ",
}  # fmt: skip
_RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u207f]+")
_LOWERED = re.compile("[\u2080-\u208e]+")
_CURRENCIES = {
    "\\$": "dollar",
    "\\euro": "euro",
    "\\texteuro": "euro",
    "\\pounds": "pound",
    "\\textsterling": "pound",
    "\\yen": "yen",
}
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_PRICE = (
    r"(\\\$|\\(?:euro|texteuro|pounds|textsterling|yen)(?![A-Za-z]))(?:\{\})?\s*"
    r"(\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)(?![\d.,/^]|\s*[\\A-Za-z({])"
)
_WORDS = (
    (
        r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|mathstrut|strut)(?![A-Za-z])\.?",
        "",
    ),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\\(?:l|r)brace(?![A-Za-z])", lambda m: r"\{" if m[0][1] == "l" else r"\}"),
    (r"\\(?:l|r)(?:vert|brack)(?![A-Za-z])", lambda m: "|" if "v" in m[0] else "[" if m[0][1] == "l" else "]"),
    (r"\\vert(?![A-Za-z])|\\mid(?![A-Za-z])", "|"),
    (r"\\(?:le|leqslant)(?![A-Za-z])", r"\\leq"),
    (r"\\(?:ge|geqslant)(?![A-Za-z])", r"\\geq"),
    (r"\\ne(?![A-Za-z])|\\not\s*=|!=(?!=)", r"\\neq "),
    (r"<=(?![=>])", r"\\leq "),
    (r"(?<![=<])>=", r"\\geq "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"\\(?:varnothing|O)(?![A-Za-z])|\\\{\s*\\\}|^\s*\{\s*\}\s*$", r"\\emptyset "),
    (r"\\backslash(?![A-Za-z])", r"\\setminus"),
    (r"\\(?:ldots|cdots|dotsc|dotsb|dotsm|hdots)(?![A-Za-z])|\.\.\.+", r"\\dots "),
    (r"\\(?:colon|ratio)(?![A-Za-z])", ":"),
    (r"\\(?:imath|jmath)(?![A-Za-z])", lambda m: m[0][1]),
    (r"\\(?:rm|bf|it|sf)(?![A-Za-z])\s*", ""),
    (r"\\\\\s*\[[^\[\]]*\]", r"\\\\"),
    (_PRICE, lambda m: f"{m[2]}\\text{{ {_CURRENCIES[m[1]]}}}"),
    (r"\\\$|\$|\\\(|\\\)|(?<!\\)\\\[|(?<!\\)\\\]|\\(?:euro|texteuro|pounds|textsterling|yen)(?![A-Za-z])(?:\{\})?", ""),
    (r"\\!\s*", ""),
    (r"\{,\}", ","),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\(?:text|mathrm|mbox)\s*\{\s*\}", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\(?:hspace|hskip)\*?\{[^{}]*\}|\{\}", " "),
    (r"\\operatorname\*", r"\\operatorname"),
    (r"\*\*", "^"),
    (r"\\frac\{\\(?:text|mathrm)\{([^{}]*)\}\}\{\\(?:text|mathrm)\{([^{}]*)\}\}", r"\\text{ \1/\2}"),
    (r"\^\s*\{?\\prime\}?", "'"),
    (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
    (r"\\log\s*_\s*\{?e\}?(?![A-Za-z])", r"\\ln "),
    (r"\\log\s*_\s*(\d)(\d+)(?!\s*[\w\\({.])", r"\\log_{\1}{\2}"),
    (r"\\overline\s*\{\s*([A-Z]{2})\s*\}", r"\1"),
    (r"(?<![A-Za-z\\])(?:\\operatorname\{abs\}|abs)\s*\(([^()]*)\)", r"|\1|"),
    (r"\{?\}?_\{?(\d+)\}?\s*C\s*_\{?(\d+)\}?", r"\\binom{\1}{\2}"),
    (r"(?<![A-Za-z\\}_])C\s*_\{?(\d+)\}?\s*\^\{?(\d+)\}?", r"\\binom{\1}{\2}"),
    (r"(?<![A-Za-z\\])C\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
    (r"(?<![.\d])(\d+)\s*(?:\\text\{\s*to\s*\}|to)\s*(\d+)(?![.\d])", r"\1:\2"),
    (
        r"(?<=[\d}])\s*(?:\\text\{\s*)?(thousand|million|billion|trillion)(?:\s*\}|(?![A-Za-z]))",
        lambda m: f"\\cdot10^{{{_POWERS[m[1]]}}}",
    ),
)
_REPLACED = tuple((re.compile(pattern), new) for pattern, new in _WORDS)
_DEGREE = re.compile(r"\\(?:degree|textdegree)(?![A-Za-z])|\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_HEXADECIMAL = re.compile(r"\\text\{\s*([0-9A-Fa-f]+)\s*\}(?=\s*_)")
_FONT = re.compile(
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|up)?|math(?:rm|it|bf|sf|tt|normal)|mbox|hbox|operatorname|boldsymbol|bm"
    r"|underline|emph)\s*(?:\{([^{}]*)\}|([A-Za-z0-9])(?![A-Za-z]))"
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{([^{}]*)\}")
_NAMES = "|".join([*FUNCTIONS, "pi", "infty", "infinity", "inf", "theta"])
_BARE_NAME = re.compile(rf"(?<![A-Za-z\\{{])(?:{_NAMES})(?![A-Za-z])")
_REPEATING = re.compile(
    r"(?<![\d.])(\d+)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{\s*(\d+)\s*\}|\\(?:bar|dot|overline)\s*(\d)|\((\d+)\))(?:\s*\\dots)?(?!\d)"
)
_BETWEEN_DOTS = re.compile(r"\\dot\s*\{?\s*(\d)\s*\}?\s*(\d*)\s*\\dot\s*\{?\s*(\d)\s*\}?")
_AND_SO_ON = re.compile(r"(?<![\d.])(\d+)\.(\d*?)(?:(\d)\3{2,}|(\d{2,}?)\4+)\s*\\dots")
_MIXED = re.compile(r"(?<![\d.}\w^_{/])(\d+)\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}(?!\s*[\^!])")
_SWALLOWED = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc|ln|log)(?:[_^]\{?\w+\}?)*)\s*(\d*[A-Za-z]|\d+|\\(?:theta|alpha|beta|pi|phi))(?=\s*\\(?:cdot|times)(?![A-Za-z]))"
)
"""A function's argument before a sign of multiplication, which sympy's grammar would read as part of the argument."""
_THOUSANDS = re.compile(r"(?<![\d.,_^])\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+|(?:'\d{3})+)(?!\d|[, ]\d)")


def canonical(text: str) -> str:
    """Return the canonical spelling; blanks stay only between two letters, two digits, or a digit and a letter."""
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = "".join(_ascii(character) for character in text).strip()
    for pattern, new in _REPLACED:
        text = pattern.sub(new, text)
    for _ in range(3):  # nested
        text = _BOX.sub(r"\1", _FONT.sub(_without_font, text))
    text = re.sub(r"\s+", " ", _DEGREE.sub(r"^{\\circ}", text)).strip(' "`')
    text = _HEXADECIMAL.sub(r"\1", _without_end(text))
    if not text.startswith(("(", "[", "\\{")):  # there a comma separates two numbers
        text = _THOUSANDS.sub(lambda m: re.sub("[, ']", "", m[0]), text)
    text = _BETWEEN_DOTS.sub(r"\\overline{\1\2\3}", text)
    text = _AND_SO_ON.sub(lambda m: _repeating(m[1], m[2], m[3] or m[4]), text)
    text = _REPEATING.sub(lambda m: _repeating(m[1], m[2], m[3] or m[4] or m[5]), text)
    text = _BARE_NAME.sub(lambda m: "\\infty" if m[0] in ("infinity", "inf") else f"\\{m[0]}", text)
    text = re.sub(r"\\lg(?![A-Za-z])", r"\\log_{10}", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\sqrt\s*(\[[^\]]*\])?\s*([A-Za-z0-9])", r"\\sqrt\1{\2}", text)
    text = _SWALLOWED.sub(r"\1(\2)", text)
    text = re.sub(r"\\frac\s*(\\[a-z]+)\s*([A-Za-z0-9])(?![A-Za-z])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([A-Za-z0-9])\s*([A-Za-z0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*([A-Za-z0-9])\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"\\frac\s*(\{[^{}]*\})\s*([A-Za-z0-9])", r"\\frac\1{\2}", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    text = re.sub(r"([\^_])\s*([-+]?)\s*(\d+|[A-Za-z])(?![\d.])", _in_braces, text)
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def _ascii(character: str) -> str:
    if character.isascii():
        return character
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    kind, plain = unicodedata.decomposition(character), unicodedata.normalize("NFKC", character)
    if kind.startswith("<fraction>"):
        above, _, below = plain.partition("\u2044")
        return f"\\frac{{{above}}}{{{below}}}"
    name = unicodedata.name(character, "").rpartition(" ")[2].lower()
    if "GREEK SMALL LETTER" in unicodedata.name(character, "") and name in _GREEK:
        return f"\\{name} "
    return plain if plain.isascii() else character


def _without_font(match: re.Match[str]) -> str:
    r"""Return a letter, function or number without its font; words stay `\text{...}`, in lower case, or stand alone."""
    content = (match[1] if match[1] is not None else match[2]).strip()
    if content.strip(" ,") in ("and", "or"):
        return f" {content.strip(' ,')} "
    if content.lower() in FUNCTIONS and not (content == "min" and re.search(r"\d\W*$", match.string[: match.start()])):
        return f"\\{content.lower()} "
    if content in ("empty set", "the empty set"):
        return "\\emptyset "
    if len(content) == 1 or not re.search(r"[A-Za-z]{2}", content) or match[0] == match.string.strip():
        return f" {content} " if "operatorname" in match[0] else content
    return f"\\text{{{content}}}" if not re.search(r"[\\^_$]", content) else content


def _without_end(text: str) -> str:
    """Strip punctuation and spaces at the end; a decimal point within a number stays."""
    return text.rstrip(" .,;:") if not text.endswith("\\dots") else text


def _repeating(whole: str, fixed: str, block: str) -> str:
    """Return the LaTeX fraction of a repeating decimal."""
    above = int(whole + fixed + block) - int(whole + fixed)
    return f"\\frac{{{above}}}{{{'9' * len(block) + '0' * len(fixed)}}}"


def _in_braces(match: re.Match[str]) -> str:
    return f"{match[1]}{{{match[2]}{match[3]}}}"


def mixed_as_sums(text: str) -> str:
    r"""Write `2\frac{1}{3}` as `(2+\frac{1}{3})`, because sympy's grammar would read it as a product."""
    return _MIXED.sub(lambda m: f"({m[1]}+\\frac{{{m[2]}}}{{{m[3]}}})" if int(m[2]) < int(m[3]) else m[0], text)
