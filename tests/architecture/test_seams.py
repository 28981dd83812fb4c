"""What the type checker can see: settings have their type, traits are declared, and little is asked for by its name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from slime_core.config.spec import flag_specs
from tests.architecture.trees import ROOT, called, files, nodes

SETTINGS_ASKED_FOR = 0
OTHERS_ASKED_FOR = 86
"""Most calls of `getattr(x, "name", default)` there may be: of settings, which all have a value, and of anything else.
Only ever lowered: a setting is `args.name`, and what a component can do is one of its traits."""

MISTAKES = """
import asyncio
from collections.abc import Mapping
from typing import Any

from slime_core import (
    Args, EngineTraits, GenerateContext, GenerationOutput, RewardInputs, RewardTraits, Sample, declares,
)
from slime_core.protocols import AdvantageEstimator, BufferFilter, DynamicFilter, GenerateFn, RewardFn, RolloutEngine


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], *, context: GenerateContext) -> Sample:
    limit = args.rollout_max_respnse_len  # E: "Args" has no attribute "rollout_max_respnse_len"
    output = await context.engine.generate(sample.prompt, sampling_params)  # E: incompatible type "str | list
    sample.responce = output.text  # E: "Sample" has no attribute "responce"
    sample.reward = output.txt  # E: "GenerationOutput" has no attribute "txt"
    return sample


def number(args: Args) -> str:
    return args.rollout_batch_size  # E: got "int", expected "str"


@declares(RewardTraits(execution="threads"))  # E: incompatible type "Literal['threads']"
def reward(args: Args, sample: Sample) -> str:
    return str(sample.label)


as_reward: RewardFn = reward  # E: Incompatible types in assignment


class Engine:
    traits = EngineTraits(takes_image=True)  # E: Unexpected keyword argument "takes_image"
    weight_transports = ("tensor",)

    async def generate(self, input_ids: str, sampling_params: Mapping[str, Any]) -> GenerationOutput:
        raise NotImplementedError


engine: RolloutEngine = Engine()  # E: Incompatible types in assignment


def plain(args: Args, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return sample


as_generator: GenerateFn = plain  # E: Incompatible types in assignment


def keep(args: Args, samples: Sample, **kwargs: Any) -> bool:
    return True


as_filter: DynamicFilter = keep  # E: Incompatible types in assignment


def newest(args: Args, rollout_id: int, buffer: list[list[Sample]]) -> list[list[Sample]]:
    return buffer


as_buffer_filter: BufferFilter = newest  # E: Incompatible types in assignment


class Estimator:
    def shape_rewards(self, args: Args, inputs: RewardInputs) -> list[float]:
        return inputs.reward  # E: "RewardInputs" has no attribute "reward"


estimator: AdvantageEstimator = Estimator()  # E: Incompatible types in assignment
"""


@cache
def _asked_for() -> list[tuple[str, str, bool]]:
    """(file and line, name, whether it has a default) of every `getattr` of a name that is written out."""
    return [
        (f"{name}:{node.lineno}", str(node.args[1].value), len(node.args) > 2)
        for file, name in files()
        for node in nodes(file, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and isinstance(node.args[1], ast.Constant)
        and not str(node.args[1].value).startswith("__")  # Python's own, such as __qualname__
    ]  # fmt: skip


def test_settings_are_not_any() -> None:
    found = [
        f"{name}:{argument.lineno}"
        for file, name in files()
        if "server_side" not in name  # SGLang's
        for node in (*nodes(file, ast.FunctionDef), *nodes(file, ast.AsyncFunctionDef))
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg == "args" and isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Any"
    ]
    assert found == []


def test_little_is_asked_for_by_its_name() -> None:
    settings = [(place, name) for place, name, _ in _asked_for() if name in flag_specs()]
    others = [(place, name) for place, name, default in _asked_for() if name not in flag_specs() and default]
    assert len(settings) <= SETTINGS_ASKED_FOR, settings
    assert len(others) <= OTHERS_ASKED_FOR, others


def _callers(name: str) -> set[str]:
    """Files of the core and of the plugins that call a function or method of that name."""
    return {file for path, file in files() if name in map(called, nodes(path, ast.Call))}


def test_there_is_one_pool() -> None:
    other_mode = "rollout/state.py"  # what a commit of another mode held is given back there
    assert _callers("prepare_return") == {"rollout/pool.py", other_mode}
    assert _callers("needs_nothing") == _callers("mask_older") == {"rollout/pool.py"}


def test_there_is_one_loop_and_one_follower() -> None:
    over_rollouts = {
        file
        for path, file in files()
        for node in nodes(path, ast.For)
        if ast.unparse(node.iter) == "range(start, args.num_rollout)"
    }
    assert over_rollouts == {"loop.py"}
    assert _callers("is_due") == {"loop.py", "slime_commands/eval/generation.py"}  # which trains nothing
    assert _callers("Follower") == {"launch/inline.py"}


@pytest.mark.slow
def test_a_mistake_at_each_seam_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mistakes.py"
    file.write_text(MISTAKES)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", str(file)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280).stdout
    found = {int(line): text for line, text in re.findall(r"mistakes\.py:(\d+): error: (.*)", said)}
    expected = {n: line.split("# E: ")[1] for n, line in enumerate(MISTAKES.split("\n"), 1) if "# E: " in line}
    assert found.keys() == expected.keys(), said
    assert all(expected[line] in text for line, text in found.items()), said
