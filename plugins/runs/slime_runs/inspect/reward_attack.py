"""Find wrong answers that a reward pays, and right answers that it does not pay.

`slime rewards attack`, `slime check` and the contract of rewards call `audit`. It uses only the scores of a reward.
First it finds the forms in which the right answer is paid more than wrong ones, then it attacks in these forms. A call
that raises or overruns its deadline is also a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_core.sample import Sample, SampleStatus
from slime_runs.inspect.attack_answers import FORMS, Attack, Case, attacks, equals

Score = Callable[[list[Sample]], Awaitable[list[float | str]]]
"""Samples of one call -> for each sample its reward, or the text of the error."""

_PAID = 0.9
"""Share of the distance from a wrong answer's reward to the right one's in its form, from which a response is paid."""
_READ = 0.7
"""Share of the distance to the best form's reward, from which the reward counts as reading a form."""
_MOST_FORMS = 2
_SHOWN = 200


@dataclass(frozen=True)
class Found:
    """A wrong response that is paid, or a right response that is not paid."""

    what: str
    """Kind of attack, or of right answer."""
    response: str
    """First 200 characters of the response."""
    label: Any
    reward: float | None
    error: str | None = None


@dataclass
class Report:
    """The result of an attack on a reward."""

    rows: int = 0
    calls: int = 0
    forms: list[str] = field(default_factory=list)
    """Forms in which the right answer is paid."""
    false_passes: list[Found] = field(default_factory=list)
    false_fails: list[Found] = field(default_factory=list)
    errors: list[Found] = field(default_factory=list)
    """Responses for which the reward returned no number, so their samples would fail."""

    @property
    def reads_answers(self) -> bool:
        """Return True if any right and wrong answers are paid differently."""
        return bool(self.forms)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return asdict(self)


class _Auditor:
    def __init__(self, score: Score, templates: Mapping[str, str], companions: bool) -> None:
        self.score, self.templates, self.companions = score, templates, companions
        self.report = Report()

    async def pay(self, case: Case, texts: Sequence[str]) -> list[float | None]:
        """Return the reward of each response; None for a response that could not be scored."""
        found: list[float | str] = []
        for result in await asyncio.gather(*(self._one(case, text) for text in texts)):
            found.append(result)
        self.report.calls += len(texts)
        for text, result in zip(texts, found):
            if isinstance(result, str):
                self.report.errors.append(Found("raised", text[:_SHOWN], case.label, None, result))
        return [None if isinstance(result, str) else result for result in found]

    async def _one(self, case: Case, text: str) -> float | str:
        samples = [_sample(case, text)]
        if self.companions:  # the group of a comparing reward: a right and a wrong answer next to the tested response
            samples += [_sample(case, case.right or ""), _sample(case, case.wrong[0])]
        return (await self.score(samples))[0]


def _sample(case: Case, text: str) -> Sample:
    prompt = case.prompt if isinstance(case.prompt, str) else [dict(message) for message in case.prompt]
    sample = Sample(group_index=0, index=0, prompt=prompt, label=case.label, metadata=dict(case.metadata))
    tokens = [ord(character) for character in text[:1000]]
    sample.append_response_tokens(None, tokens, [-0.5] * len(tokens), text=text)
    sample.status = SampleStatus.COMPLETED
    return sample


async def audit(
    score: Score,
    cases: Sequence[Case],
    *,
    templates: Mapping[str, str] = FORMS,
    companions: bool = False,
    made: bool = False,
) -> Report:
    """Attack a reward.

    Args:
        score: Scores the samples of one call.
        cases: Rows. If right answers of a kind are never paid, the report has only this finding for the kind.
        templates: Forms of an answer.
        companions: Score each response in a group with a right and a wrong one.
        made: The rows are synthetic, so a row whose right answer is not paid is not a finding.

    Returns:
        False passes, false fails and errors, with the responses.
    """
    auditor = _Auditor(score, templates, companions)
    report = auditor.report
    report.rows = len(cases)
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(case.kind, []).append(case)
    for members in kinds.values():
        await _kind(auditor, members, made)
    if not report.reads_answers and len(report.errors) < report.calls:
        for case in cases[:1]:
            text = "no form of the right answer is paid more than a wrong one"
            report.false_fails.append(Found(text, str(case.right or "")[:_SHOWN], case.label, None))
    return report


async def _kind(auditor: _Auditor, cases: Sequence[Case], made: bool) -> None:
    tables = [await _table(auditor, case) for case in cases]
    shares = {name: [table.share(name) for table in tables] for name in auditor.templates}
    count = {name: sum(share >= _READ for share in found) for name, found in shares.items()}
    read = [name for name in auditor.templates if count[name] * 2 >= len(cases) and count[name]]
    read.sort(key=lambda name: -count[name])
    programs = [case for case in cases if case.kind == "code"]
    if not read and not programs:
        return
    auditor.report.forms += [name for name in read if name not in auditor.report.forms]
    for case, table in zip(cases, tables):
        forms = [name for name in read if table.share(name) >= _READ]
        if read and not forms and not made and case.right is not None:
            auditor.report.false_fails.append(
                Found("right", auditor.templates[read[0]].format(case.right)[:_SHOWN], case.label, table.high)
            )
        if made and forms and not await _reads_equals(auditor, case, table, forms[0]):
            continue  # not a reward of mathematics
        if forms or (case.kind == "code" and table.high > 0):
            await _attacked(auditor, case, table, forms[:_MOST_FORMS])


async def _reads_equals(auditor: _Auditor, case: Case, table: _Table, form: str) -> bool:
    """Return True if the reward pays the spellings that a synthetic row declares equal."""
    paid = await auditor.pay(case, [auditor.templates[form].format(text) for text in case.equal])
    return all(reward is not None and reward >= table.bar([form], form) for reward in paid)


@dataclass
class _Table:
    """The rewards of one row's right and wrong answers, by form."""

    right: dict[str, float]
    low: float
    high: float

    def share(self, name: str) -> float:
        """Return the reward of form `name` on a scale from a wrong answer (0) to the right one's best form (1)."""
        return _share(self.right.get(name, self.low), self.low, self.high)

    def bar(self, forms: Sequence[str], name: str | None) -> float:
        """Return the lowest reward at which a response in this form counts as paid."""
        rights = [self.right[form] for form in ([name] if name else forms)]
        return self.low + _PAID * (min(rights, default=self.high) - self.low)


def _share(value: float, low: float, high: float) -> float:
    return (value - low) / (high - low) if high > low else 0.0


async def _table(auditor: _Auditor, case: Case) -> _Table:
    names = list(auditor.templates)
    first, second = [
        await auditor.pay(case, [auditor.templates[name].format(wrong) for name in names]) for wrong in case.wrong[:2]
    ]
    rights: list[float | None] = [None] * len(names)
    if case.right is not None:
        rights = await auditor.pay(case, [auditor.templates[n].format(case.right) for n in names])
    # The reward may pay one of the two by mistake; the attack reports this later.
    low = max((min(a, b) for a, b in zip(first, second) if a is not None and b is not None), default=0.0)
    right = {name: value for name, value in zip(names, rights) if value is not None}
    return _Table(right, low, max(right.values(), default=low + 1e-3))


async def _attacked(auditor: _Auditor, case: Case, table: _Table, forms: Sequence[str]) -> None:
    tried: list[Attack] = list(attacks(case, forms, auditor.templates))
    texts = list(dict.fromkeys(text for attack in tried for text in attack.texts))
    paid = dict(zip(texts, await auditor.pay(case, texts)))
    for attack in tried:
        rewards = [paid[text] for text in attack.texts]
        bar = table.bar(forms, attack.form)
        if all(reward is not None and reward >= bar for reward in rewards):
            auditor.report.false_passes.append(Found(attack.name, attack.texts[0][:_SHOWN], case.label, rewards[0]))
    for name in forms:
        wanted = list(equals(case, name, auditor.templates[name], whole=table.share("bare") >= _READ))
        for (what, text), reward in zip(wanted, await auditor.pay(case, [text for _, text in wanted])):
            if reward is not None and reward < table.bar(forms, name):
                auditor.report.false_fails.append(Found(what, text[:_SHOWN], case.label, reward))
