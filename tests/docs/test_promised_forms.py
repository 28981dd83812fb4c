"""The preflight accepts every form of function that the docs' tables promise.

The forms are read from the built page `hooks.md` of the reference and from the tables of `docs/plugins`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from slime_testing_probes.probes import PROBES, Bench

from scripts import generate_docs
from slime_core.config import Args
from slime_core.plugins.hooks import hook_specs
from slime_core.plugins.kind import Call, Kind
from slime_core.plugins.kinds import KINDS, function_flags, hook_flags
from slime_core.plugins.resolve import resolve

DOCS = Path(__file__).parents[2] / "docs"
ARGS = Args(n_samples_per_prompt=2, rm_type="exact")
ROWS = {
    flag: row for row in (*KINDS.values(), *function_flags().values(), *hook_flags().values()) for flag in row.flags
}
ANSWERS = {
    "float": "1.0",
    "list[float]": "[1.0] * len(samples)",
    "(raw_rewards, rewards)": "([1.0] * len(samples), [0.0] * len(samples))",
    "FilterDecision | bool": "True",
    "bool": "False",
    "dict": "{'tokens': [s.tokens for s in samples]}",
    "list[Group]": "[buffer.pop(0)][:num_samples]",
    "list[Sample]": "buffer[:num_samples]",
    "Sample | None": "sample",
}
"""What a function of a form returns, by what the table says behind the arrow; None where it says None."""
_RESPOND = """    for one in {0} if isinstance({0}, list) else [{0}]:
        one.append_response_tokens(tokens=[52], log_probs=[-1.0], text="4")
        one.status = one.Status.COMPLETED
    return {0}
"""
_ADVANTAGES = """    import torch
    rollout_data["advantages"] = rollout_data["returns"] = [torch.zeros(n) for n in rollout_data["response_lengths"]]
"""
BODIES = {
    "generators": {name: _RESPOND.format(name) for name in ("sample", "samples")},
    "advantages": {"rollout_data": _ADVANTAGES},
    "estimators": {"rollout_data": _ADVANTAGES},
}
"""Kind -> its second argument -> what a function does whose work is not what it returns."""


def promised() -> list[tuple[str, str]]:
    """(flag, form) of every function in the tables."""
    cells = [line.split(" | ") for line in generate_docs.component_rows()]
    found = [(row[0].strip("|` "), form) for row in cells for form in re.findall(r"`([^`]*)`", row[2])]
    for name, spec in hook_specs().items():
        found += re.findall(r"Flag: `([^`]*)`, called as `([^`]*)`", generate_docs.hook_section(name, spec))
    for page, flag in (("rewards", "--custom-rm-path"), ("buffers", "--buffer-filter-path")):
        text = (DOCS / f"plugins/{page}.md").read_text(encoding="utf-8")
        found += [(flag, form) for form in re.findall(r"^(?:\| |A .*?)`(\(args[^`]*\)[^`]*)`", text, re.MULTILINE)]
    return [(flag, form.replace("\\|", "|")) for flag, form in found if not form.startswith("class ")]


def sources(row: Kind, form: str) -> dict[str, str]:
    """Ways to write a function of that form: plain and async, with and without what stands in brackets."""
    call = Call(form)
    known = next(c for c in row.calls if (c.positional, c.named) == (call.positional, call.named))
    returned = (form if "->" in form else known.shown).partition("-> ")[2]
    special = BODIES.get(row.name, {})
    body = special.get(call.positional[1] if special else "", f"    return {ANSWERS.get(returned)}\n")
    ways: dict[str, str] = {}
    for word in ("async ", ""):
        if known.plain if word else known.awaited:
            continue
        for optional in ((), call.keywords):
            names = ", ".join(
                [*call.positional, *(["*"] if call.named else []), *call.named, *(f"{k}=None" for k in optional)]
            )
            ways[f"{word}({names})"] = f"{word}def {row.canonical[0]}({names}):\n{body}"
    return ways


ROW = {"place": "", "spec": None, "prompt": "2+2=", "label": "4", "metadata": {}}


def preflight(row: Kind, source: Path, bench: Bench) -> None:
    """What the fresh process of the preflight does with one component."""
    kind = row.registered if row.name in KINDS else row.name
    resolved = resolve(kind, str(source), origin=row.flags[0])
    if row.name == "buffers":
        bench.args.buffer_filter_path = str(source)
    if probe := PROBES.get(kind):
        probe(bench, resolved)


def test_every_form_of_the_tables(tmp_path: Path) -> None:
    forms = promised()
    assert ("--buffer-filter-path", "(args, buffer, num_samples) -> list[Sample]") in forms
    assert ("--custom-rm-path", "[async] (args, samples[, evaluation], **kwargs) -> list[float]") in forms
    assert {flag for flag, _ in forms} >= {row.flags[0] for row in hook_flags().values()}
    for flag, form in forms:
        for number, (way, source) in enumerate(sources(ROWS[flag], form).items()):
            file = tmp_path / f"form_{abs(hash((flag, form)))}_{number}.py"
            file.write_text(source)
            try:
                preflight(ROWS[flag], file, Bench(ARGS, [ROW]))
            except Exception as error:
                pytest.fail(f"{flag}, {form} as {way}: {type(error).__name__}: {error}")
