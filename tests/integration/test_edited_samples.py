"""Code that may look at a sample changes what it is trained on: named with the field, whatever the code is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core import BufferBase, Sample
from slime_core.config import Args
from slime_core.data.buffer import SampleBuffer, resolve_buffer
from slime_core.errors import PluginError

RunLoop = Callable[..., Any]
REWARD = """
import asyncio
from slime_core import RewardTraits, declares

def edit(s):
    if s.index % 4 == 1:
        {edit}

{head}
    {body}
"""
ONE = "def reward(args, sample):", "edit(sample); return float(sample.index % 2)"
FORMS = {
    "inline": ("@declares(RewardTraits(execution='inline'))\n" + ONE[0], ONE[1]),
    "thread": ("@declares(RewardTraits(execution='thread'))\n" + ONE[0], ONE[1]),
    "process": ONE,
    "async": ("async " + ONE[0], "await asyncio.sleep(0); " + ONE[1]),
    "batch": (
        "def reward(args, samples):",
        "[edit(s) for s in samples]; return [float(s.index % 2) for s in samples]",
    ),
    "group": (
        "@declares(RewardTraits(scores_groups=True))\ndef reward(args, samples):",
        "[edit(s) for s in samples]; return [float(s.index % 2) for s in samples]",
    ),
}
EDITS = {
    "tokens": "s.tokens[-1] = 7 + (s.tokens[-1] == 7)",
    "loss_mask": "s.loss_mask = [1 - m for m in s.loss_mask]",
    "rollout_log_probs": "s.rollout_log_probs[0] -= 0.5",
    "token_weight_versions": "s.token_weight_versions = [v + 1 for v in s.token_weight_versions]",
    "spans": "s.spans = None",
    "index": "s.index += 1000",
    "group_index": "s.group_index += 1",
}


def code(folder: Path, text: str, name: str = "mine") -> Path:
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


@pytest.mark.parametrize("form", [f if f == "process" else pytest.param(f, marks=pytest.mark.slow) for f in FORMS])
def test_a_reward_that_writes_to_the_tokens_fails_its_sample(form: str, run_loop: RunLoop, tmp_path: Path) -> None:
    head, body = FORMS[form]
    path = code(tmp_path, REWARD.format(edit=EDITS["tokens"], head=head, body=body))
    run = run_loop(1, custom_rm_path=path)
    failed = {s.index for s in run.samples[0] if s.status == Sample.Status.FAILED}
    assert failed == {1, 5, 9, 13}
    for sample in run.samples[0]:
        if sample.index in failed:
            assert "mine.py" in sample.metadata["failure"]["where"]
            assert "it changed sample.tokens" in sample.metadata["failure"]["error"]
        else:
            assert sample.reward == float(sample.index % 2)


def test_a_hook_that_does_not_say_that_it_edits_fails_its_sample(run_loop: RunLoop, tmp_path: Path) -> None:
    """Every field in one run; the samples are counted under their own numbers all the same."""
    lines = [f"    if s.index == {2 * at}:\n        {edit}; return\n" for at, edit in enumerate(EDITS.values())]
    path = code(tmp_path, "def hook(args, s):\n" + "".join(lines))
    digits = "slime_testing_contracts.tiny.digits"
    run = run_loop(1, custom_rm_path=digits, rollout_sample_hook_path=[f"{path}:hook"])
    assert [(s.index, s.group_index) for s in run.samples[0]] == [(i, i // 4) for i in range(16)]
    for sample, field in zip(run.samples[0][::2], EDITS):
        failure = sample.metadata["failure"]
        assert sample.status == Sample.Status.FAILED
        assert failure["where"].startswith("--rollout-sample-hook-path")
        assert f"it changed sample.{field}, " in failure["error"]
        assert "EditTraits(edits_samples=True)" in failure["error"]
    assert sum(s.status == Sample.Status.FAILED for s in run.samples[0]) == len(EDITS)


PLUGIN = """
from slime_core import EditTraits, declares, hookimpl

{declared}
@hookimpl
def slime_{hook}:
    {body}
"""
HOOKS = {
    "sample_generated(sample)": "sample.loss_mask[0] = 0",
    "filter_samples(groups)": "groups[0][0].loss_mask[0] = 0",
    "process_all_samples(all_groups)": "all_groups[0][0].loss_mask[0] = 0",
}


def plugin_folder(tmp_path: Path, hook: str, declared: str) -> Path:
    folder = tmp_path / "acme-edit"
    folder.mkdir()
    module = f"acme_{hook.partition('(')[0]}_{len(declared)}"
    code(folder, PLUGIN.format(hook=hook, body=HOOKS[hook], declared=declared), module)
    entry = f'[project.entry-points."slime.plugins"]\nedit = "{module}"\n'
    (folder / "pyproject.toml").write_text(f'[project]\nname = "acme-edit"\nversion = "1"\n{entry}')
    return folder


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_plugin_edits_where_it_says_so(hook: str, run_loop: RunLoop, tmp_path: Path) -> None:
    folder = plugin_folder(tmp_path, hook, "@declares(EditTraits(edits_samples=True))")
    run = run_loop(1, plugin_dir=[folder], custom_rm_path="slime_testing_contracts.tiny.digits")
    masked = [s.index for s in run.samples[0] if s.loss_mask[0] == 0]
    assert masked == (list(range(16)) if "generated" in hook else [0])


@pytest.mark.parametrize("hook", list(HOOKS)[1:])
def test_a_hook_plugin_that_says_nothing_ends_the_run(hook: str, run_loop: RunLoop, tmp_path: Path) -> None:
    folder = plugin_folder(tmp_path, hook, "")
    with pytest.raises(PluginError, match=r"hook plugin 'acme-edit:edit', sample 0: it changed sample.loss_mask"):
        run_loop(1, plugin_dir=[folder], custom_rm_path="slime_testing_contracts.tiny.digits")


FILTER = """
from slime_core import EditTraits, declares

{declared}
def keep(args, samples, **kwargs):
    samples[0].rollout_log_probs[0] = -9.0
    return True
"""


def test_a_dynamic_filter_that_edits_ends_the_run_unless_it_says_so(run_loop: RunLoop, tmp_path: Path) -> None:
    settings = {"custom_rm_path": "slime_testing_contracts.tiny.digits"}
    path = code(tmp_path, FILTER.format(declared=""))
    with pytest.raises(PluginError, match=r"keep' \(group \d+\), sample \d+: it changed sample.rollout_log_probs"):
        run_loop(1, **settings, dynamic_sampling_filter_path=f"{path}:keep")
    path = code(tmp_path, FILTER.format(declared="@declares(EditTraits(edits_samples=True))"), "declared")
    run = run_loop(1, **settings, dynamic_sampling_filter_path=f"{path}:keep")
    assert sum(s.rollout_log_probs[0] == -9.0 for s in run.samples[0]) == 4


BUFFER = """
from slime_core import EditTraits, declares

{declared}
def pick(args, rollout_id, buffer, num_samples):
    buffer[0][1].loss_mask[2] = 0
    taken, buffer[:] = buffer[:num_samples], buffer[num_samples:]
    return taken
"""


class Watches(BufferBase):
    def observe(self, groups: list[list[Sample]], trained: bool) -> None:
        groups[0][0].tokens.reverse()


def test_a_buffer_that_is_shown_what_is_trained_on_leaves_it_alone() -> None:
    sample = Sample(index=3, tokens=[1, 2, 3, 4], response_length=3)
    with pytest.raises(PluginError, match=r"sample 3: it changed sample\.tokens"):
        SampleBuffer(Args(buffer_filter_path="w"), 1, Watches(Args())).observe([[sample]], True)


@pytest.mark.parametrize("declared", [False, True])
def test_a_buffer_filter_hands_out_what_it_was_given(declared: bool, tmp_path: Path) -> None:
    text = BUFFER.format(declared="@declares(EditTraits(edits_samples=True))" if declared else "")
    args = Args(buffer_filter_path=f"{code(tmp_path, text)}:pick")
    buffer = SampleBuffer(args, 2, resolve_buffer(args))
    group = [Sample(index=i, tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 1, 1]) for i in range(2)]
    buffer.add([group])
    if declared:
        assert buffer.take(1) == [group]
        return
    with pytest.raises(PluginError, match=r"--buffer-filter-path .*pick', sample 1: it changed sample.loss_mask"):
        buffer.take(1)


def test_a_reward_that_sorts_the_list_it_was_given_is_refused(run_loop: RunLoop, tmp_path: Path) -> None:
    """The order of its answer would be that of nobody's samples."""
    body = "samples.sort(key=lambda s: -s.index); return [float(s.index) for s in samples]"
    path = code(tmp_path, f"def reward(args, samples):\n    {body}\n")
    with pytest.raises(Exception, match="reordered the list of samples"):
        run_loop(1, custom_rm_path=path, group_rm=True, max_consecutive_failures=4)
