"""The contract of rewards."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from slime_runs.inspect.attack_answers import case_of, made_cases
from slime_runs.inspect.attacked_reward import scored_by
from slime_runs.inspect.reward_attack import audit

from slime_core.plugins.adapters import RewardCaller, execution_of
from slime_core.plugins.signatures import construct, is_async
from slime_core.sample import Sample, SampleStatus
from slime_testing_contracts.base import Contract, only_where
from slime_testing_contracts.samples import answered_sample

_LABELS: tuple[Any, ...] = (
    None, "", 5, 2.5, math.nan, True, [], ["2"], [["2"]], [None], {}, {"answer": "2"}, '["2"]', '{"answer": "2"}',
)  # fmt: skip
"""Labels of every form that rows have."""
_FORMS = ("{}", r"\boxed{{{}}}", r"</think>\boxed{{{}}}", "Answer: {}", "The answer is ({}).")
_CHOICES = (r"\boxed{{{}}}", "The answer is ({}).")
"""Forms in which answers to multiple choice are tried."""


class RewardContract(Contract):
    """Contract of rewards: return a finite number or a mapping for any input, repeatably, without changing samples."""

    kind = "rewards"
    examples: ClassVar[Sequence[tuple[Any, str, Any, Any]]] = ()
    """Examples as (prompt, response, label, expected reward)."""
    label: ClassVar[Any] = "2"
    """Label that the reward can read; a reward may raise ValueError for other labels."""
    deterministic: ClassVar[bool] = True

    def score(self, *samples: Sample) -> list[Any]:
        """Return a reward per sample, scored by the same caller as in a rollout."""
        caller = RewardCaller(self.resolved, self.settings)
        return asyncio.run(caller.score(list(samples)))

    def test_examples(self) -> None:
        """The author's examples hold."""
        for prompt, response, label, expected in self.examples:
            (found,) = self.score(answered_sample(prompt, response, label))
            assert found == pytest.approx(expected), (
                f"the example says {expected!r}, the reward {found!r}: prompt {prompt!r}, response {response!r},"
                f" label {label!r}"
            )

    @pytest.mark.parametrize(
        ("response", "label", "status"),
        [
            ("", "2", SampleStatus.COMPLETED),
            ("the answer is", "2", SampleStatus.TRUNCATED),
            ("the ans", "2", SampleStatus.ABORTED),
            (r"\boxed{", "2", SampleStatus.TRUNCATED),
            (r"\boxed{}", "2", SampleStatus.COMPLETED),
            ("\u7b54\u6848\u662f 2 \U0001f389 \x00", "2", SampleStatus.COMPLETED),
            ("2 " * 50_000, "2", SampleStatus.TRUNCATED),
            ("(" * 5_000 + "{" * 5_000, "2", SampleStatus.COMPLETED),
            ("\ud800 \u202e \ufeff \u0661\u0662", "2", SampleStatus.COMPLETED),
            (r"\boxed{" + "9" * 5_000 + "}", "2", SampleStatus.COMPLETED),
            (r"\boxed{nan} \boxed{inf} \boxed{-1e999}", "2", SampleStatus.COMPLETED),
            (r"\boxed{\frac{1}{0}} 9**9**9**9", "2", SampleStatus.COMPLETED),
            ("\n\n\t \r\n", "2", SampleStatus.COMPLETED),
        ],
        ids=[
            "empty-response", "truncated", "aborted", "open-box", "empty-box", "unicode", "100k-characters",
            "unbalanced", "odd-unicode", "5000-digits", "not-finite", "impossible-number", "white-space",
        ],
    )  # fmt: skip
    def test_odd_inputs_get_a_reward(self, response: str, label: Any, status: SampleStatus) -> None:
        """No text of a model makes the reward raise, or return a value that is not a finite number."""
        label = self.label
        sample = answered_sample("1+1=", response, label, status)
        try:
            (found,) = self.score(sample)
        except Exception as error:
            pytest.fail(
                f"a reward must answer whatever the model wrote; for response {_short(response)}, label {label!r} and"
                f" status {status.value!r} it raised {type(error).__name__}: {error}"
            )
        _check(found, response, label)

    @pytest.mark.parametrize("label", _LABELS, ids=repr)
    def test_another_label_is_read_or_refused(self, label: Any) -> None:
        """A label of any form decides the reward, or raises ValueError whatever the response."""
        examples = self.examples or [("1+1=", str(self.label), self.label, None)]
        _, _, right, _ = examples[0]
        found, refused = set(), []
        asked = _responses(examples, label)
        for (_, response), reward in zip(asked, self._each(asked, label)):
            if isinstance(reward, ValueError):  # the row cannot be scored
                refused.append(str(reward))
            elif isinstance(reward, Exception):
                pytest.fail(
                    f"for the response {_short(response)} with the label {label!r} it raised {type(reward).__name__}:"
                    f" {reward}; raise a ValueError that names a label which the reward cannot read"
                )
            else:
                _check(reward, response, label)
                found.add(repr(reward))
        assert not (found and refused), (
            f"the label {label!r} is refused for some responses only ({refused[:1]}); read the label first"
        )
        own = _responses(examples[:1], right) if len(found) == 1 else []
        assert len(found) != 1 or len(set(map(repr, self._each(own, right)))) == 1, (
            f"with the label {label!r} every response gets {found.pop()}; raise a ValueError that names a label which"
            " the reward cannot read (slime_core.right_answers reads texts, numbers and lists of them)"
        )

    def _each(self, asked: Sequence[tuple[Any, str]], label: Any) -> list[Any]:
        """Return the reward of each (prompt, response), or what scoring it raised."""
        caller = RewardCaller(self.resolved, self.settings)

        async def in_turn() -> list[Any]:
            found: list[Any] = []
            for prompt, response in asked:
                try:
                    found += await caller.score([answered_sample(prompt, response, label)])
                except Exception as error:
                    found.append(error)
            return found

        return asyncio.run(in_turn())

    def test_chat_prompt(self) -> None:
        """Prompts may be chat messages."""
        sample = answered_sample(label=self.label)
        sample.prompt = [{"role": "user", "content": "1+1="}]
        _check(self.score(sample)[0], sample.response, sample.label)

    def test_the_sample_is_left_alone(self) -> None:
        """The reward is returned and not written into the sample; only its parts may be."""
        sample = answered_sample(label=self.label)
        before = sample.to_dict()
        self.score(sample)
        after = sample.to_dict()
        names = {*before, *after} - {"reward_components"}
        changed = sorted(name for name in names if before.get(name) != after.get(name))
        assert not changed, (
            f"a reward is returned, not written into the sample; it changed sample.{', sample.'.join(changed)}"
        )

    @only_where(lambda suite: suite.deterministic)
    def test_same_input_same_reward(self) -> None:
        """The same sample gets the same reward, unless the class sets `deterministic = False`."""
        first, second = self.score(answered_sample(label=self.label)), self.score(answered_sample(label=self.label))
        assert first == second, (
            f"the same sample got {first[0]!r} and then {second[0]!r}; for a reward that may differ, set"
            " deterministic = False"
        )

    @only_where(lambda suite: suite.deterministic)
    def test_many_at_once(self) -> None:
        """64 concurrent calls give the same rewards as 64 consecutive calls."""
        responses = [rf"so \boxed{{{i % 5}}}" for i in range(64)]
        samples = [answered_sample("?", response, self.label) for response in responses]
        caller = RewardCaller(self.resolved, self.settings)

        async def both() -> tuple[list[Any], list[Any]]:
            in_turn = [await caller.score([sample]) for sample in samples]
            return in_turn, await asyncio.gather(*(caller.score([sample]) for sample in samples))

        in_turn, found = asyncio.run(both())
        differ = [i for i, (one, other) in enumerate(zip(found, in_turn)) if one != other]
        assert not differ, f"64 calls at once gave other rewards than one after the other, for samples {differ[:8]}"

    def test_a_batch_keeps_length_and_order(self) -> None:
        """A call with several samples returns a reward for each, in order; also for a batch of one."""
        samples = [answered_sample("?", rf"\boxed{{{i}}}", self.label) for i in range(4)]
        together = self.score(*samples)
        assert len(together) == 4, f"4 samples got {len(together)} rewards"
        caller = RewardCaller(self.resolved, self.settings)
        if self.deterministic and not caller.scores_groups:
            alone = [self.score(sample)[0] for sample in samples]
            assert together == alone, (
                f"four samples in one call got {together!r}, one by one {alone!r}; for a reward that compares the"
                " samples of a group, set scores_groups = True on it"
            )
        assert len(self.score(samples[0])) == 1, "a batch of one gets one reward"

    @only_where(lambda suite: suite.deterministic)
    def test_no_wrong_answer_is_paid(self) -> None:
        """The attacks of `slime rewards attack` fail on the examples' labels, or on made rows without such labels.

        Programs are not tried here, since a program that ends its process would end the tests.
        """
        cases = [case_of(prompt, label, {}) for prompt, _, label, _ in self.examples[:8] if label not in (None, "")]
        told = {(case.kind, case.right): case for case in cases if case and case.kind != "code"}
        attacked = list(told.values())[:3] or ([] if self.examples else made_cases())
        caller = RewardCaller(self.resolved, self.settings)
        if not attacked:
            pytest.skip("no example has a label to attack")
        report = asyncio.run(audit(scored_by(caller), attacked, companions=caller.scores_groups, made=True))
        paid = [f"{f.what}: {f.response!r} for label {f.label!r} got {f.reward}" for f in report.false_passes]
        assert not paid, f"{len(paid)} wrong answers are paid; slime rewards attack prints all: {'; '.join(paid[:4])}"

    def test_where_it_runs_is_a_place_there_is(self) -> None:
        """The component's `execution`, if declared, is valid."""
        obj = self.resolved.obj
        built = construct(obj, self.settings) if inspect.isclass(obj) else obj
        function = built.compute_reward if callable(getattr(built, "compute_reward", None)) else built
        execution_of(built, self.component, is_async=is_async(function), default="process")


def _responses(examples: Sequence[tuple[Any, str, Any, Any]], label: Any) -> list[tuple[Any, str]]:
    """Return (prompt, response) of the examples, of the examples with `label` as their answer, and of bare answers."""
    texts = [str(label), *map(str, label)] if isinstance(label, list) and label else [str(label)]
    found = [(prompt, response) for prompt, response, _, _ in examples]
    found += [(p, r.replace(str(right), text)) for p, r, right, _ in examples for text in texts if str(right)]
    bare = [form.format(text) for form in _FORMS for text in [*texts, "2"]]
    bare += [form.format(letter) for form in _CHOICES for letter in "ABCDEFGHIJ"]
    return [*found, *((examples[0][0], text) for text in ["", *bare])]


def _check(found: Any, response: str, label: Any) -> None:
    right = isinstance(found, Mapping) or (isinstance(found, float) and math.isfinite(found))
    assert right, (
        f"a reward is a finite number or a mapping of numbers; for response {_short(response)} and label {label!r} it"
        f" was {found!r}"
    )


def _short(text: str) -> str:
    shown = ascii(text)
    return shown if len(shown) <= 60 else f"{shown[:40]}... ({len(text)} characters)"
