"""Every example runs, at tiny size, and does what it says."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
from pathlib import Path

import pytest
from slime_rewards.processes.pool import WorkerPool
from slime_testing_contracts import FilterContract, GeneratorContract, RewardContract

from slime_core import RewardCaller, Sample, resolve
from slime_core.config import Args
from slime_core.config.spec import flag_specs
from tests.conftest import Slime, TinyRun
from tests.run_files import samples

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_every_example_is_tested_here() -> None:
    """Or in a file of its own, here or among the tests of integration and Megatron, which names its directory."""
    tests = [
        Path(__file__).parent,
        *(Path(__file__).parents[1] / place for place in ("integration", "backends/megatron")),
        EXAMPLES.parent / "plugins/python/tests",
    ]
    text = "".join(file.read_text(encoding="utf-8") for folder in tests for file in folder.glob("test_*.py"))
    assert {p.name for p in EXAMPLES.iterdir() if p.name not in text and not p.name.startswith(("__", "."))} == set()


def test_the_index_has_every_example_with_its_command() -> None:
    """`test_every_example_is_tested_here` finds the tests."""
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|[")]
    linked = {row[0].partition("](")[2].removesuffix(")") for row in rows}
    own = {str(path.relative_to(EXAMPLES)) for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*/README.md")]}
    assert own - linked == set()
    assert [path for path in linked if not (EXAMPLES / path).exists()] == []
    assert len(rows) >= 16
    for _, command, shows, takes, expect in rows:
        assert all((shows, takes, expect))
        program, *words = shlex.split(command.strip("`"))
        assert program in ("slime", "python", "sh", "jupyter")
        named = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
        assert [name for name in named if name not in flag_specs() and name not in ("config", "sglang_config")] == []
        paths = [word.partition(":")[0] for word in words if word.startswith("examples/")]
        assert [path for path in paths if not (EXAMPLES.parent / path).exists()] == []


@pytest.mark.slow
def test_rl_loop(tiny: TinyRun, tmp_path: Path, program: Slime) -> None:
    shutil.copytree(tiny.root / "model", tmp_path / "model")
    shutil.copy(tiny.root / "train.jsonl", tmp_path / "train.jsonl")
    shutil.copy(tiny.root / "eval.jsonl", tmp_path / "heldout.jsonl")
    size = ["--rollouts", "2", "--prompts", "4", "--samples", "4"]
    done = program(EXAMPLES / "rl_loop.py", "--inputs", tmp_path, *size, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rollout 2/2" in done.stdout
    assert len((EXAMPLES / "rl_loop.py").read_text().splitlines()) < 300


class TestCustomReward(RewardContract):
    component = str(EXAMPLES / "custom_reward.py")
    args = {"token_price": 0.01}
    examples = [("1+1=", r"\boxed{2}", "2", 0.91), ("1+1=", r"\boxed{3}", "2", 0.0), ("1+1=", "2", "2", 0.0)]


class TestCustomFilter(FilterContract):
    component = str(EXAMPLES / "custom_filter.py")
    examples = [([1.0, 0.0], True), ([0.0, 0.0], False), ([1.0, 1.0], False), ([None, None], False)]


class TestCustomGenerate(GeneratorContract):
    component = str(EXAMPLES / "custom_generate.py")
    script = (r"\boxed{3}", r"\boxed{2}")
    max_new_tokens = 400


def test_rewards_of_other_trainers(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    """Each scores; one of them trains."""
    args = Args(reward_key="score")
    right = Sample(prompt="1+1=", response=r"\boxed{2}", label="2", index=0, tokens=[1, 2, 3], response_length=2)
    found = {}
    for name in ("boxed_reward", "short_reward", "compute_score", "reward_func", "mentions_answer"):
        caller = RewardCaller(resolve("rewards", f"{EXAMPLES / 'other_trainers.py'}:{name}"), args)
        (found[name],) = asyncio.run(caller.score([right]))
    assert {name: reward["score"] for name, reward in found.items()} == {
        "boxed_reward": 1.0, "short_reward": 0.5, "compute_score": 1.0, "reward_func": 1.0, "mentions_answer": 1.0,
    }  # fmt: skip
    assert found["compute_score"]["boxed"] == 1.0
    assert found["reward_func"]["characters"] == 9
    argv = tiny.argv(tmp_path / "run", num_rollout=1, custom_rm_path=f"{EXAMPLES / 'other_trainers.py'}:boxed_reward")
    slime("rollout", *argv)
    assert {s["status"] for s in samples(tmp_path / "run")} <= {"completed", "truncated"}


def test_custom_generate_in_a_run(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    script = EXAMPLES / "custom_generate.py"
    argv = tiny.argv(tmp_path / "run", num_rollout=1, rollout_max_response_len=40, custom_generate_function_path=script)
    slime("rollout", *argv)
    found = samples(tmp_path / "run")
    assert all(s["status"] in ("completed", "truncated") for s in found)
    for sample in found:
        fed_back = "wrong<|end|>" in sample["response"]
        assert (0 in sample["loss_mask"]) == fed_back


def test_third_party_plugin_from_its_folder(tiny: TinyRun, slime: Slime, tmp_path: Path) -> None:
    folder = EXAMPLES / "third_party_plugin"
    argv = tiny.argv(tmp_path / "run", num_rollout=2, custom_rm_path="digits", plugin_dir=folder)
    slime("train", *argv)
    plugins = json.loads((tmp_path / "run/summary.json").read_text())["plugins"]
    reward = next(p for p in plugins if p["kind"] == "rewards")
    assert (reward["distribution"], reward["version"]) == ("slime-reward-digits", "0.1.0")


@pytest.mark.slow
def test_third_party_plugin_keeps_its_own_contract(program: Slime) -> None:
    folder = EXAMPLES / "third_party_plugin"
    done = program("pytest", "-q", "-p", "no:cacheprovider", folder, cwd=folder, SLIME_PLUGIN_DIR=str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_judge_runs_where_the_page_says() -> None:
    """`tests/backends/test_several_models.py` trains with it."""
    folder = EXAMPLES / "engines/judge"
    pool = WorkerPool(Args(), 1)  # which starts nothing before it is asked
    for spec, execution in (("reward.py", "async"), ("reward.py:blocking", "process")):
        found = resolve("rewards", str(folder / spec))
        assert RewardCaller(found, Args(), workers=lambda: pool, spec=str(folder / spec)).execution == execution
