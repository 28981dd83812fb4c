"""The suites must fail on components that break the contract: each bad component below fails the test it should."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slime_core.testing import (
    BufferContract,
    EstimatorContract,
    FilterContract,
    GeneratorContract,
    ModelContract,
    RewardContract,
)

BAD_COMPONENTS = {
    "RaisesWithoutALabel": (
        RewardContract,
        "def reward(args, sample):\n    return float(sample.label)\n",
        "test_odd_inputs_get_a_reward[no-label]",
    ),
    "ChangesTheSample": (
        RewardContract,
        "def reward(args, sample):\n    sample.reward = 1.0\n    return 1.0\n",
        "test_the_sample_is_left_alone",
    ),
    "IsRandom": (
        RewardContract,
        "import random\ndef reward(args, sample):\n    return random.random()\n",
        "test_same_input_same_reward",
    ),
    "DependsOnTheBatch": (
        RewardContract,
        "def reward(args, samples):\n    return [float(i) for i in range(len(samples))]\n",
        "test_a_batch_keeps_length_and_order",
    ),
    "ForgetsWhatIsThere": (
        GeneratorContract,
        "async def generate(args, sample, sampling_params, *, context):\n"
        "    out = await context.engine.generate(sample.prompt_tokens, sampling_params)\n"
        "    sample.append_response_tokens(args, out.token_ids, out.log_probs, True, out.meta_info, out.text)\n"
        "    return sample\n",
        "test_a_partial_sample_is_continued",
    ),
    "GeneratesNothing": (
        GeneratorContract,
        "async def generate(args, sample, sampling_params):\n    return sample\n",
        "test_a_finished_answer",
    ),
    "LeavesGroupsInTheBuffer": (
        BufferContract,
        "def buffer_filter(args, rollout_id, buffer, num_samples):\n    return buffer[:num_samples]\n",
        "test_takes_at_most_what_was_asked[5-3]",
    ),
    "ChangesTheGroup": (
        FilterContract,
        "def dynamic_filter(args, samples):\n    samples.pop()\n    return True\n",
        "test_the_group_is_left_alone",
    ),
    "DoesNotDecide": (
        FilterContract,
        "def dynamic_filter(args, samples):\n    return None\n",
        "test_every_group_gets_a_decision[[0.5]]",
    ),
    "DependsOnTheRank": (
        EstimatorContract,
        "import torch\n"
        "def compute_advantages(args, rollout_data):\n"
        "    r = rollout_data['rewards'] - rollout_data['rewards'].mean()\n"
        "    a = [torch.full((n,), float(x)) for n, x in zip(rollout_data['response_lengths'], r)]\n"
        "    rollout_data['advantages'] = rollout_data['returns'] = a\n",
        "test_a_sample_depends_on_no_other",
    ),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """`Class::test` of what failed when the tests in question were run on the bad components in one fresh pytest."""
    folder = tmp_path_factory.mktemp("bad")
    lines = ["from slime_core.testing import *"]
    for name, (contract, body, _) in BAD_COMPONENTS.items():
        file = folder / f"{name}.py"
        file.write_text(body)
        lines += [f"class Test{name}({contract.__name__}):", f"    component = {str(file)!r}"]
    (folder / "test_bad.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=no", "-p", "no:cacheprovider"]
    command += [f"test_bad.py::Test{name}::{test}" for name, (_, _, test) in BAD_COMPONENTS.items()]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    found = [line.split("::", 1)[1] for line in result.stdout.splitlines() if line.startswith("FAILED ")]
    assert found, result.stdout + result.stderr
    return {entry.split(" - ")[0] for entry in found}


@pytest.mark.parametrize("name", BAD_COMPONENTS)
def test_a_bad_component_fails(name: str, failures: set[str]) -> None:
    assert f"Test{name}::{BAD_COMPONENTS[name][2]}" in failures


def test_replacing_a_contract_test_needs_a_reason() -> None:
    def test_examples(self: object) -> None: ...

    with pytest.raises(TypeError, match=r"replaces a test of the contract.*xfail"):
        type("TestMine", (RewardContract,), {"test_examples": test_examples})
    marked = pytest.mark.xfail(reason="known")(test_examples)
    type("TestMine", (RewardContract,), {"test_examples": marked, "test_more": test_examples})


def test_every_suite_names_its_kind() -> None:
    suites = (RewardContract, GeneratorContract, BufferContract, FilterContract, EstimatorContract, ModelContract)
    assert [suite.kind for suite in suites] == ["rewards", "generators", "buffers", "filters", "estimators", "models"]
