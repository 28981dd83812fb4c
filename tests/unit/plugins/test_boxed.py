from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.errors import PluginNotFoundError
from slime_core.plugins.adapters import RewardCaller
from slime_core.plugins.answers import last_boxed
from slime_core.plugins.registry import Registry
from slime_core.plugins.resolve import find, resolve
from slime_core.sample import Sample

ARGS = Args(reward_key=None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("7", None),
        (r"\boxed{85}<|end|>", "85"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{}", ""),
        (r"\boxed{85", None),
        (r"\boxed{1} then \boxed{2", None),
        ("\\boxed{1\\", None),
        (r"\boxed {7}", "7"),
        (r"so $\fbox{7}$.", "7"),
        (r"\boxed{1} and \fbox{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"so $\boxed 7$.", "7"),
        (r"so \(\boxed -\frac{1}{2}\).", r"-\frac{1}{2}"),
        (r"so \boxed 7, of course", "7"),
        ("\\boxed\n7", "7"),
        (r"\boxed", None),
        (r"\boxedsomething{7}", None),
        (r"\boxed {7", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


def length(args: Any, sample: Sample) -> float:
    return float(len(sample.response))


async def length_async(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(len(sample.response))


def length_batch(args: Any, samples: list[Sample]) -> list[float]:
    return [float(len(s.response)) for s in samples]


class Texts:
    def compute_reward(self, prompts: list[Any], responses: list[str]) -> list[float]:
        return [float(len(text)) for text in responses]


@pytest.mark.parametrize("obj", [length, length_async, length_batch, Texts, Texts()])
def test_every_form_of_reward_is_told_the_box(obj: Any) -> None:
    registry = Registry()
    registry.add_object("rewards", "length", obj)
    resolved = resolve("rewards", "boxed_length", registry=registry)
    assert (resolved.ref.name, resolved.ref.provenance()["name"]) == ("length", "boxed_length")
    samples = [Sample(response=text) for text in (r"well, \boxed{four} it is", "no box", r"\boxed{open", r"\boxed{}")]
    assert asyncio.run(RewardCaller(resolved, ARGS).score(samples)) == [4.0, 0.0, 0.0, 0.0]
    assert samples[0].response == r"well, \boxed{four} it is"
    plain = resolve("rewards", "length", registry=registry)
    assert asyncio.run(RewardCaller(plain, ARGS).score(samples[1:2])) == [6.0]


def test_the_prefix_is_of_registered_names_and_a_registered_name_wins() -> None:
    registry = Registry()
    registry.add_object("rewards", "length", length)
    assert find("rewards", "boxed_length", registry=registry) is not None
    assert find("rewards", "boxed_mod.fn", registry=registry) is None  # an import path
    with pytest.raises(PluginNotFoundError, match=r"'lenght'.*length"):
        resolve("rewards", "boxed_lenght", registry=registry)
    with pytest.raises(PluginNotFoundError, match="boxed_"):
        resolve("rewards", "boxed_", registry=registry)
    registry.add_object("rewards", "boxed_length", length_async)
    assert resolve("rewards", "boxed_length", registry=registry).obj is length_async
    with pytest.raises(PluginNotFoundError):
        resolve("filters", "boxed_length", registry=registry)


def test_of_an_installed_reward() -> None:
    caller = RewardCaller(resolve("rewards", "boxed_f1"), ARGS)
    assert "boxed_f1" in caller.label
    sample = Sample(response=r"It is \boxed{the brown fox}, I think", label="a quick brown fox")
    assert asyncio.run(caller.score([sample])) == [pytest.approx(0.8)]
