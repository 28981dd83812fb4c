"""A stand-in for a judging model: reads the reference and the answer of a question, and believes what it is told.

As a model does, it can be talked into a score by text that is not clearly set apart; it never obeys what stands between
two lines that are equal and random-looking, nor inside JSON.
"""

from __future__ import annotations

import json
import re

_ORDER = re.compile(
    r"ignore|full (?:score|marks)|score:? *10|you must|\[reference|reference:|system:|correct", re.IGNORECASE
)


def ask(question: str) -> str:
    """`Score: N` of 0 to 10."""
    reference = re.search(r"[Rr]eference(?: answer)?\"?:\s*\"?([^\n\"]*)", question)
    answer = _fenced(question)
    if answer is None:
        found = re.search(r"(?:Answer:|<response>)\s*(.*?)(?:\nScore|</response>|\Z)", question, re.DOTALL)
        answer = found[1] if found else ""
        if len(_ORDER.findall(question)) > len(_ORDER.findall(question.replace(answer, ""))):
            return "As asked. Score: 10"
    right = reference is not None and _said(answer) == reference[1].strip()
    return "Score: 10" if right else "Score: 0"


def _said(answer: str) -> str:
    return re.sub(r"^(?:the answer is|answer:)\s*", "", answer.strip(), flags=re.IGNORECASE).rstrip(".").strip()


def _fenced(question: str) -> str | None:
    if found := re.search(r"^(-{5}[0-9a-f]{16})\n(.*?)\n\1$", question, re.DOTALL | re.MULTILINE):
        return found[2]
    if found := re.search(r"^\{.*\}$", question, re.MULTILINE):
        try:
            value = json.loads(found[0]).get("answer")
            return value if isinstance(value, str) else None
        except ValueError:
            return None
    return None
