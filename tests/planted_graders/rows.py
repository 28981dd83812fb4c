"""The rows that planted graders are for, by the first part of their names."""

from __future__ import annotations

from typing import Any

CHOICES = ["an electron", "a muon", "the tau", "a quark"]
_LISTED = "\n".join(f"{letter}) {text}" for letter, text in zip("ABCD", CHOICES))
ROWS: dict[str, list[tuple[Any, Any, dict[str, Any]]]] = {
    "number": [("6*7?", "42", {}), ("1-13?", "-12", {}), ("7/2?", "3.5", {}), ("1000+234?", "1234", {})],
    "choice": [(f"Which?\n{_LISTED}", letter, {"choices": CHOICES}) for letter in "BDA"],
    "text": [("Capital of France?", "Paris", {}), ("Who found radium?", "Marie Curie", {}), ("Sea?", "Baltic Sea", {})],
    "json": [("As JSON.", '{"name": "Ada", "age": 36}', {}), ("As JSON.", '{"city": "Rome", "in": "Italy"}', {})],
    "small": [("How likely?", "0.0000002", {}), ("How far?", "0.00000015", {})],
    "tuple": [("Which point?", "(1, 2)", {}), ("Which point?", "(3, 7)", {})],
    "set": [("Which roots?", r"\{3, 4\}", {})],
    "numeral": [("In base 2?", "1011_2", {}), ("In base 5?", "12_5", {})],
    "list": [("Which numbers?", r"1, 2, \dots, 9", {}), ("Which numbers?", r"2, 4, \ldots, 100", {})],
    "word": [("Which line?", "AB", {}), ("Which word?", "listen", {})],
    "judge": [("2+3?", "5", {}), ("Capital of France?", "Paris", {})],
    "code": [
        (
            "Write add(a, b).",
            "assert add(1, 2) == 3\nassert add(-1, 1) == 0",
            {
                "solution": "def add(a, b):\n    return a + b",
                "calls": ["add(1, 2)", "add(-1, 1)"],
                "values": [3, 0],
            },
        )
    ],
}
