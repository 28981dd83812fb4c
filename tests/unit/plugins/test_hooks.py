"""Plugins and the functions of flags that have one hook: order, names in errors, what is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.config import Args
from slime_core.errors import PluginError, PluginLoadError, PluginNotFoundError, PluginSignatureError
from slime_core.plugins.hooks import Hooks, hook_specs, implement
from slime_core.plugins.kinds import hook_flags
from slime_core.plugins.manager import build_manager
from slime_core.plugins.resolve import resolve
from slime_core.protocols import EditTraits, declares
from slime_core.rollout.hooks import RolloutHooks
from slime_core.sample import Sample, SampleStatus
from tests.hooks_with import hooks_with

GROUP = "slime.plugins"


def hook_module(hook: str, parameter: str, body: str, how: str = "") -> str:
    return f"from slime_core import hookimpl\n@hookimpl{how}\ndef {hook}({parameter}):\n    {body}\n"


def hooks_of_dir(plugin_dir: Path, hook: str, *functions: Callable[..., Any]) -> Hooks:
    manager = build_manager(Args(plugin_dir=[str(plugin_dir)]))
    row = hook_flags()[hook]
    for number, function in enumerate(functions):
        implement(manager, row, function, f"{row.flags[0]} {number}")
    return Hooks(manager)


@pytest.mark.parametrize("hook", hook_flags())
def test_a_flags_function_gets_thudm_slimes_arguments(hook: str) -> None:
    call = hook_flags()[hook].calls[0]
    seen: list[Any] = []
    given = {name: f"the {name}" for name in hook_specs()[hook].__annotations__ if name != "return"}
    assert tuple(given) == (*call.positional, *call.keywords)

    def by_position(*values: Any) -> None:
        seen.append(values)

    def by_name(*values: Any, evaluation: Any = None) -> None:
        seen.append(evaluation)

    getattr(hooks_with((hook, by_position), (hook, by_name)), hook)(**given)
    assert seen == [tuple(given[name] for name in call.positional), given.get("evaluation")]


def test_plugins_come_before_flags_which_keep_their_order(write_plugin, plugin_dir: Path) -> None:
    """Whatever a plugin asks for, the run's own functions have the last word."""
    for name, how in (("thing-plain", ""), ("thing-late", "(trylast=True)")):
        body = hook_module("slime_train_data", "rollout_data", f"rollout_data.append({name!r})", how)
        write_plugin(name, {GROUP: {name.replace("-", "_"): "plug_" + name.replace("-", "_")}}, body)
    order: list[str] = []
    flags = [lambda args, rollout_id, data, name=name: data.append(name) for name in ("first", "second")]
    hooks_of_dir(plugin_dir, "slime_train_data", *flags).slime_train_data(args=0, rollout_id=0, rollout_data=order)
    assert order == ["thing-plain", "thing-late", "first", "second"]


def test_a_sample_goes_from_a_plugins_hook_to_the_flags(write_plugin, plugin_dir: Path) -> None:
    body = hook_module("slime_sample_generated", "sample, evaluation", "sample.metadata['by'] = ['plugin', evaluation]")
    write_plugin("thing-hooks", {GROUP: {"watch": "plug_thing_hooks"}}, body)

    @declares(EditTraits(edits_samples=True))
    async def replaces(args: Any, sample: Sample) -> Sample:
        return Sample(index=8, status=sample.status, metadata={"by": [*sample.metadata["by"], "flag"]})

    hooks = RolloutHooks.of(hooks_of_dir(plugin_dir, "slime_sample_generated", replaces, replaces))
    sample, args = Sample(index=7, status=SampleStatus.COMPLETED), Args(rollout_timeout=5.0)
    (found,) = asyncio.run(hooks.after_generation(args, [sample], 0, True))
    assert (found.index, found.metadata) == (8, {"by": ["plugin", True, "flag", "flag"]})
    assert [hook.label for hook in hooks.on_sample] == [
        "hook plugin 'thing-hooks:watch'", "--rollout-sample-hook-path 0", "--rollout-sample-hook-path 1",
    ]  # fmt: skip


def test_all_log_functions_are_called_and_one_is_enough_to_leave_ours_out(write_plugin, plugin_dir: Path) -> None:
    body = hook_module("slime_log_eval", "extra_metrics", "extra_metrics['plugin'] = 1.0; return True")
    write_plugin("thing-hooks", {GROUP: {"watch": "plug_thing_hooks"}}, body)

    def log(rollout_id: int, args: Any, data: Any, metrics: dict[str, float]) -> bool:
        metrics["flag"] = metrics["plugin"] + 1
        return False

    metrics: dict[str, float] = {}
    hooks = RolloutHooks.of(hooks_of_dir(plugin_dir, "slime_log_eval", log))
    assert any(hooks.told.slime_log_eval(rollout_id=0, args=Args(log_samples="none"), data={}, extra_metrics=metrics))
    assert metrics == {"plugin": 1.0, "flag": 2.0}
    assert not any(
        hooks.told.slime_log_rollout(rollout_id=0, args=Args(), samples=[], extra_metrics=metrics, rollout_time=1.0)
    )


def test_an_error_names_the_plugin_or_the_flag(write_plugin, plugin_dir: Path) -> None:
    body = hook_module("slime_step_end", "metrics", "1 / 0")
    write_plugin("thing-hooks", {GROUP: {"watch": "plug_thing_hooks"}}, body)

    def broken(args: Any, groups: Any) -> None:
        raise KeyError("x")

    hooks = hooks_of_dir(plugin_dir, "slime_filter_samples", broken)
    told = r"^hook plugin 'watch' \(thing-hooks 1\.0\): slime_step_end raised ZeroDivisionError: .* \(at .*:4\)$"
    with pytest.raises(PluginError, match=told):
        hooks.slime_step_end(rollout_id=0, metrics={})
    with pytest.raises(PluginError, match=r"^--rollout-sample-filter-path 0 raised KeyError: 'x' \(at .*\)$"):
        hooks.slime_filter_samples(args=0, groups=[])


def test_an_async_hook_is_refused_where_nobody_awaits_it(write_plugin, plugin_dir: Path) -> None:
    body = hook_module("slime_sample_generated", "sample", "pass").replace("def", "async def")
    write_plugin("thing-fine", {GROUP: {"fine": "plug_thing_fine"}}, body)
    build_manager(Args(plugin_dir=[str(plugin_dir)]))
    body = body.replace("sample_generated(sample", "run_end(")
    write_plugin("thing-hooks", {GROUP: {"watch": "plug_thing_hooks"}}, body)
    with pytest.raises(PluginLoadError, match=r"\(thing-hooks 1\.0\): slime_run_end is `async`.*--no-plugins"):
        build_manager(Args(plugin_dir=[str(plugin_dir)]))


def test_a_hook_may_be_of_something_that_is_not_here(write_plugin, plugin_dir: Path) -> None:
    body = hook_module("slime_of_another_trainer", "model", "1 / 0", "(optionalhook=True)")
    write_plugin("thing-hooks", {GROUP: {"watch": "plug_thing_hooks"}}, body)
    built = build_manager(Args(plugin_dir=[str(plugin_dir)]))
    assert "thing-hooks:watch" in [name for name, _ in built.list_name_plugin()]


def test_a_wrapper_is_refused_where_each_is_called_alone(write_plugin, plugin_dir: Path) -> None:
    body = hook_module("slime_sample_generated", "sample", "return (yield)", "(wrapper=True)")
    write_plugin("thing-hooks", {GROUP: {"watch": "plug_thing_hooks"}}, body)
    with pytest.raises(PluginLoadError, match="slime_sample_generated wraps other plugins"):
        build_manager(Args(plugin_dir=[str(plugin_dir)]))


def test_an_answer_nobody_reads_is_said_once(write_plugin, plugin_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = hook_module("slime_step_end", "metrics", "return 1")
    write_plugin("thing-hooks", {GROUP: {"watch": "plug_thing_hooks"}}, body)
    hooks = hooks_of_dir(plugin_dir, "slime_train_data", lambda args, rollout_id, rollout_data: rollout_data)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            hooks.slime_step_end(rollout_id=0, metrics={})
            hooks.slime_train_data(args=0, rollout_id=0, rollout_data={})
    assert [message.split(",")[0] for message in caplog.messages] == [
        "hook plugin 'watch' (thing-hooks 1.0): slime_step_end returned int",
        "--rollout-data-postprocess-path 0 returned dict",
    ]


def test_a_flag_takes_a_path_and_no_name(tmp_path: Path) -> None:
    with pytest.raises(PluginNotFoundError, match=r"--x \(flag\): rollout log 'mine': no path of a function; write"):
        resolve("slime_log_rollout", "mine", origin="--x (flag)")
    file = tmp_path / "mine.py"
    file.write_text("def log_eval(rollout_id, args, data): ...\n")
    with pytest.raises(PluginSignatureError, match=r"eval log .*\(rollout_id, args, data, extra_metrics\) -> bool"):
        resolve("slime_log_eval", str(file), origin="--x (flag)")
