"""The suites must fail on components that break the contract: each bad component below fails the test it should."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_testing_contracts import (
    BufferContract,
    CommandContract,
    CustomLossContract,
    DataSourceContract,
    EnvironmentContract,
    EstimatorContract,
    FilterContract,
    GeneratorContract,
    HookContract,
    LauncherContract,
    LossContract,
    RecipeContract,
    RewardContract,
    RewardPostProcessContract,
    RolloutContract,
    SampleConverterContract,
    ToolContract,
    ToolParserContract,
    WeightTransportContract,
    suite_of,
    suites,
)

from slime_core.errors import PluginConflictError
from tests.conftest import Slime

SOURCE = """
import copy
from slime_core import Sample

class DataSource:
    def __init__(self, args):
        self.args, self.drawn, self.back = args, 0, []
    def get_samples(self, num_samples):
        out, self.back = self.back[:num_samples], self.back[num_samples:]
        return out + [self.group() for _ in range(num_samples - len(out))]
    def add_samples(self, samples):
        self.back += samples
    def group(self):
        n = self.args.n_samples_per_prompt
        group = [Sample(prompt=str(self.drawn), index=n * self.drawn + i, group_index=self.drawn) for i in range(n)]
        self.drawn += 1
        return group
    def state_dict(self):
        return {"drawn": self.drawn, "back": [[s.to_dict() for s in g] for g in self.back]}
    def load_state_dict(self, state):
        self.drawn = state["drawn"]
        self.back = [[Sample.from_dict(s) for s in g] for g in state["back"]]
"""
ROLLOUT = """
from slime_core import RolloutFnTrainOutput

async def generate_rollout(args, rollout_id, data_source, evaluation=False, *, context):
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in [s for g in groups for s in g]:
        out = await context.engine.generate(sample.tokens, {"max_new_tokens": 5})
        sample.append_response_tokens(args, out.token_ids, out.log_probs, True, out.meta_info, out.text)
        sample.reward = 1.0
    return RolloutFnTrainOutput(groups)
"""
LOSS = """
import torch

class Loss:
    needs_advantages, needs_entropy = True, False
    def __init__(self, args, estimator):
        pass
    def bind(self, batch, tensors, denominators):
        def loss_fn(output):
            mask = torch.cat([tensors.loss_masks[p] for p in output.positions])
            weights = denominators.weights(batch, output.positions, mask)
            loss = -(weights * output.log_probs).sum()
            return loss, {"loss": loss.detach()}
        return loss_fn
"""


def hook_contract(hook: str) -> type[HookContract]:
    """The suite for a function that is given to the hook's flag."""
    return type(f"{hook}_contract", (HookContract,), {"kind": hook})


HOOKS = "def {}(args, {}):\n    {}\n".format
"""Name, parameters, body."""

BAD_COMPONENTS = {
    "SaysNothingOfItself": (
        CommandContract,
        "from slime_core import Command\ncommand = Command(lambda argv: print('usage: slime x') or 0)\n",
        "test_its_module_says_what_it_does",
    ),
    "HasNoTraits": (
        LauncherContract,
        "class Launcher:\n    traits = {}\n    def missing(self, args): ...\n    def train(self, settings): ...\n",
        "test_it_loads",
    ),
    "RaisesWithoutALabel": (
        RewardContract,
        "def reward(args, sample):\n    return float(sample.label)\n",
        "test_another_label_is_read_or_refused[None]",
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
    "DependsOnTheRank": (
        EstimatorContract,
        "import torch\n"
        "def compute_advantages(args, rollout_data):\n"
        "    r = rollout_data['rewards'] - rollout_data['rewards'].mean()\n"
        "    a = [torch.full((n,), float(x)) for n, x in zip(rollout_data['response_lengths'], r)]\n"
        "    rollout_data['advantages'] = rollout_data['returns'] = a\n",
        "test_a_sample_depends_on_no_other",
    ),
    "ForgetsWhatWasGivenBack": (
        DataSourceContract,
        SOURCE.replace("self.back += samples", "pass"),
        "test_what_is_given_back_comes_first",
    ),
    "ForgetsWhereItWas": (
        DataSourceContract,
        SOURCE.replace('self.drawn = state["drawn"]', "pass"),
        "test_a_resumed_source_goes_on",
    ),
    "NoRewards": (
        RolloutContract,
        ROLLOUT.replace("sample.reward = 1.0", "pass"),
        "test_every_group_can_be_trained_on",
    ),
    "HidesErrors": (
        RolloutContract,
        ROLLOUT.replace(
            'out = await context.engine.generate(sample.tokens, {"max_new_tokens": 5})',
            'sample.status = sample.Status.COMPLETED; sample.reward = 0.0; continue',
        ),
        "test_what_the_engine_does_wrong_is_not_hidden",
    ),
    "DividesByTheMicroBatch": (
        LossContract,
        LOSS.replace("(weights * output.log_probs).sum()", "(mask * output.log_probs).mean()"),
        "test_no_split_changes_anything[False]",
    ),
    "CustomMean": (
        CustomLossContract,
        "def custom_loss(args, batch, logits, sum_of_sample_mean):\n    return logits.mean(), {}\n",
        "test_no_split_changes_anything[True]",
    ),
    "LosesTheMask": (
        hook_contract("slime_sample_generated"),
        HOOKS("sample_hook", "sample", "sample.loss_mask = [1]"),
        "test_a_sample_can_be_trained_on[truncated-training]",
    ),
    "TakesSamplesOut": (
        hook_contract("slime_filter_samples"),
        HOOKS("sample_filter", "groups", "groups[0].pop()"),
        "test_a_filter_marks_and_nothing_else",
    ),
    "ChangesRewards": (
        hook_contract("slime_process_all_samples"),
        HOOKS("process_all_samples", "all_groups, data_source", "all_groups[0][0].reward = 9.0"),
        "test_all_samples_are_looked_at_and_not_touched",
    ),
    "LogsText": (
        hook_contract("slime_log_rollout"),
        "def log_rollout(rollout_id, args, samples, extra_metrics, rollout_time):\n    extra_metrics['a'] = 'b'\n",
        "test_logging_a_rollout_changes_metrics_only[6]",
    ),
    "AnswersText": (
        hook_contract("slime_log_eval"),
        "def log_eval(rollout_id, args, data, extra_metrics):\n    return 'logged'\n",
        "test_logging_an_evaluation_changes_metrics_only",
    ),
    "RemovesWeights": (
        hook_contract("slime_weights_written"),
        "import shutil\ndef post_write(args, version_dir, rollout_engines):\n    shutil.rmtree(version_dir)\n",
        "test_weight_files_are_left_as_they_are[delta]",
    ),
    "LosesATensor": (
        WeightTransportContract,
        "from slime_core.protocols import TransportTraits\n"
        "class Transport:\n"
        "    traits = TransportTraits(arrives_by='tensor')\n"
        "    def __init__(self, args): pass\n"
        "    def send(self, weights, version, engines): return engines.take(iter(list(weights)[1:]))\n"
        "    @staticmethod\n"
        "    async def deliver(args, engine, payload, version):\n"
        "        return await engine.update_weights_from_tensor(payload, version)\n",
        "test_engines_get_what_was_trained",
    ),
    "LeavesOneOut": (
        RewardPostProcessContract,
        HOOKS(
            "post_process_rewards", "samples",
            "r = [s.reward for s in samples]\n    return r, r[1:]",
        ),
        "test_every_sample_gets_two_numbers[equal]",
    ),
    "ForgetsRemovedSamples": (
        SampleConverterContract,
        HOOKS(
            "convert_samples", "samples",
            "return {'tokens': [s.tokens for s in samples], 'response_lengths': [s.response_length for s in samples],"
            " 'rewards': [s.reward for s in samples], 'loss_masks': [[1] * s.response_length for s in samples]}",
        ),
        "test_a_removed_sample_is_not_trained_on",
    ),
    "CutsAColumn": (
        hook_contract("slime_train_data"),
        HOOKS("postprocess_rollout_data", "rollout_id, rollout_data", "rollout_data['advantages'].pop()"),
        "test_columns_of_train_data_keep_their_shapes",
    ),
    "DropsTheSecondCall": (
        ToolParserContract,
        "from slime_core.tools import *\nfrom slime_tool_parsers import *\n"
        "class ToolParser(MarkedParser):\n    begin, end = '<c>', '</c>'\n"
        "    def calls_in(self, body, tools):\n        return [json_call(body)]\n"
        "    def render(self, calls):\n        c = calls[0]\n"
        "        return '<c>' + json_text({'name': c.name, 'arguments': c.arguments}) + '</c>'\n"
        "    def claims(self, chat_template):\n        return '<c>' in chat_template\n",
        "test_calls_that_were_written_are_read",
    ),
    "ShowsEverySampleSomethingElse": (
        EnvironmentContract,
        "from slime_core import Step\nclass Environment:\n    def __init__(self, args):\n        pass\n"
        "    def reset(self, sample):\n        return f'Guess {sample.index}.'\n"
        "    def step(self, action):\n        return Step('no')\n    def close(self):\n        pass\n",
        "test_samples_of_a_group_see_the_same",
    ),
    "SaysNothing": (
        ToolContract,
        "def tool(city: str) -> str:\n    return city\n",
        "test_every_tool_says_what_it_does",
    ),
    "WritesOver": (
        RecipeContract,
        "from pathlib import Path\ndef prepare(args):\n    Path(args.prompt_data).parent.mkdir(exist_ok=True)\n"
        "    Path(args.prompt_data).write_text('x')\n",
        "test_what_the_user_has_is_left_alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("float(sample.label.split()[0] == '2')", "'NoneType' object has no attribute 'split'"),
        ("float(sample.label)", "TypeError"),
        ("float('nan') if sample.label is None else 1.0", "finite number"),
        ("float(str(sample.label) == '2')", None),
        ("float(bool(sample.label) and sample.response == str(sample.label))", "the label None every response gets"),
        ("float(sample.response in right_answers(sample.label))", None),
        ("sample.response == '' or float(sample.response in right_answers(sample.label))", "refused for some"),
    ],
)
def test_rewards_are_tried_with_other_labels_than_their_examples_have(
    tmp_path: Path, body: str, complaint: str | None
) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text(f"from slime_core import right_answers\ndef reward(args, sample):\n    return {body}\n")
    members = {"component": str(file), "examples": [("1+1=", "2", "2", 1.0)]}
    suite = type("TestMine", (RewardContract,), members)()

    def all_labels() -> None:
        for label in (None, "", ["2"], {"answer": "2"}):
            suite.test_another_label_is_read_or_refused(label)

    if complaint is None:
        all_labels()
        return
    with pytest.raises((AssertionError, pytest.fail.Exception), match=complaint):
        all_labels()


@pytest.fixture(scope="module")
def failures(program: Slime, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """`Class::test` of what failed when the tests in question were run on the bad components in one fresh pytest."""
    folder = tmp_path_factory.mktemp("bad")
    lines = ["from slime_testing_contracts import *"]
    for name, (contract, body, _) in BAD_COMPONENTS.items():
        file = folder / f"{name}.py"
        file.write_text(body)
        suite = HookContract if issubclass(contract, HookContract) else contract
        lines += [f"class Test{name}({suite.__name__}):", f"    kind, component = {contract.kind!r}, {str(file)!r}"]
    (folder / "test_bad.py").write_text("\n".join(lines))
    words = ["-q", "-rf", "--tb=no", "-p", "no:cacheprovider"]
    words += [f"test_bad.py::Test{name}::{test}" for name, (_, _, test) in BAD_COMPONENTS.items()]
    result = program("pytest", *words, cwd=folder)
    found = [line.split("::", 1)[1] for line in result.stdout.splitlines() if line.startswith("FAILED ")]
    assert found, result.stdout + result.stderr
    return {entry.split(" - ")[0] for entry in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_COMPONENTS)
def test_a_bad_component_fails(name: str, failures: set[str]) -> None:
    assert f"Test{name}::{BAD_COMPONENTS[name][2]}" in failures


def test_replacing_a_contract_test_needs_a_reason() -> None:
    def test_examples(self: object) -> None: ...

    with pytest.raises(TypeError, match=r"replaces a test of the contract.*xfail"):
        type("TestMine", (RewardContract,), {"test_examples": test_examples})
    marked = pytest.mark.xfail(reason="known")(test_examples)
    type("TestMine", (RewardContract,), {"test_examples": marked, "test_more": test_examples})


def test_the_good_ones_of_this_file_pass(tmp_path: Path) -> None:
    """So that the bad ones fail for the line they change."""
    for name, text in (("source", SOURCE), ("loss", LOSS)):
        (tmp_path / f"{name}.py").write_text(text)
    source = type("Source", (DataSourceContract,), {"component": str(tmp_path / "source.py")})()
    source.folder = tmp_path
    source.test_what_is_given_back_comes_first()
    source.test_a_resumed_source_goes_on()
    type("Good", (LossContract,), {"component": str(tmp_path / "loss.py")})().test_no_split_changes_anything(False)


def test_every_suite_has_bad_components() -> None:
    from slime_core.plugins.kinds import KINDS, function_flags, hook_flags

    tried = {contract.kind for contract, *_ in BAD_COMPONENTS.values()}
    assert {hook for hook in hook_flags() if "megatron" not in hook} <= tried
    elsewhere = {
        "models", "megatron_models", "engines", "trainers", "corrections", "loss_reducers", "advantages", "functions",
        "megatron_model_providers",
    }  # fmt: skip
    assert (tried | elsewhere) - set(hook_flags()) == {*KINDS, *function_flags()}


def test_a_strangers_suite_is_found_and_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_suites.py").write_text(
        "from slime_testing_contracts import Contract\n"
        "class TheirContract(Contract):\n    kind = 'functions'\n    def test_theirs(self): ...\n"
    )
    facts = tmp_path / "theirs-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    suite = "their_suites:TheirContract"
    (facts / "entry_points.txt").write_text(f"[slime.contracts]\nfunctions = {suite}\nrewards = {suite}\n")
    monkeypatch.syspath_prepend(tmp_path)
    theirs = suite_of("functions")
    assert theirs.__name__ == "TheirContract"
    with pytest.raises(TypeError, match=r"TestMine\.test_theirs replaces a test of the contract"):
        type("TestMine", (theirs,), {"test_theirs": lambda self: None})
    with pytest.raises(PluginConflictError, match=r"'rewards' of 'slime\.contracts' are several"):
        suite_of("rewards")


def test_a_package_has_a_suite_for_each_of_its_components() -> None:
    class TestBand(FilterContract):
        component = "band"

    facts = {"length": {"examples": []}, "length: tight": {"args": {"a": 1}}, "nonzero_std": None}
    made = suites("filters", "slime_filters", facts, {"__name__": "here", "TestBand": TestBand})
    assert {name: (case.component, case.kind) for name, case in made.items()} == {
        "TestFiltersLength": ("length", "filters"),
        "TestFiltersLengthTight": ("length", "filters"),
        "TestFiltersNonzeroStdWithFallback": ("nonzero_std_with_fallback", "filters"),
    }
    assert made["TestFiltersLengthTight"].args == {"a": 1}
    with pytest.raises(KeyError, match=r"slime_filters has no filters plugin 'bond'; it has: band, length"):
        suites("filters", "slime_filters", {"bond": {}}, {"__name__": "here"})
