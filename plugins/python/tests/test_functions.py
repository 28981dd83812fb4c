"""Functions, classes and objects of a script as components: each form of each kind, by the way it travels."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from slime_python.functions import hook_directory, spec_of

from slime_core.errors import ConfigError
from slime_core.plugins.manager import bare_manager, forget_registry
from slime_core.plugins.resolve import resolve

CALLS: dict[str, tuple[str, str, str]] = {
    "reward": ("rewards", "args, sample", "float(len(sample))"),
    "generate": ("generators", "args, sample, sampling_params", "sample"),
    "dynamic_filter": ("filters", "args, samples, **kwargs", "True"),
    "buffer_filter": ("buffers", "args, rollout_id, buffer, num_samples", "buffer"),
    "estimator": ("estimators", "args, rollout_data", "None"),
    "loss": ("custom_losses", "args, batch, logits, sum_of_sample_mean", "(0, {})"),
    "rollout": ("rollouts", "args, rollout_id, data_source", "[]"),
    "environment": ("environments", "", ""),
    "tool": ("tools", "expression: str", "expression"),
}
"""Kind's word -> its name, and the parameters and result of a function."""
SOURCE = """
def make(held):
    {word} f({parameters}):
        'Return something.'
        held
        return {result}
    class Called:
        {word} __call__(self, {parameters}):
            held
            return {result}
        {word} method(self, {parameters}):
            held
            return {result}
    g = lambda {bare}: (held, {result})[1]
    return dict(function=f, lambdas=g, bound=Called().method, instance=Called(), classes=Called)

class Environment:
    def __init__(self, args=None): self.turns = []
    def reset(self, sample): return None
    def step(self, action): return None
    def close(self): self.turns.append('closed')
"""
FORMS = {
    "reward": "function lambdas bound instance classes",
    "generate": "function bound instance",
    "dynamic_filter": "function lambdas bound instance",
    "buffer_filter": "function lambdas bound instance",
    "estimator": "function lambdas bound instance",
    "loss": "function lambdas bound instance",
    "rollout": "function lambdas bound instance",
    "environment": "instance classes",
    "tool": "function bound",
}
HELD = {"pickled": "one", "kept": threading.Lock()}


def given_as(kind: str, form: str, held: Any, module: dict[str, Any]) -> Any:
    """Return an object as a notebook's cell makes it, or as a module in `module` does."""
    _, parameters, result = CALLS[kind]
    word, bare = "async def" if kind == "generate" else "def", parameters.partition(":")[0]
    exec(SOURCE.format(word=word, parameters=parameters, bare=bare, result=result or "None"), module)
    if kind != "environment":
        return module["make"](held)[form]
    made: Any = module["Environment"]
    if held != "one":
        made.held = held
    return made if form == "classes" else made()


@pytest.mark.parametrize("way", ["pickled", "kept"])
@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind, forms in FORMS.items() for form in forms.split()])
def test_every_form_of_every_kind(
    tmp_path: Path, kind: str, form: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = spec_of(kind, given_as(kind, form, HELD[way], {"__name__": "__main__"}), tmp_path)
    assert spec.startswith("slime_python.here:") == (way == "kept")
    assert ("runs on a thread of this process" in caplog.text) == (way == "kept")
    found = resolve(CALLS[kind][0], spec).obj
    if kind == "environment":
        first, second = found(None), found(None)
        first.close()
        assert (first.turns, second.turns) == (["closed"], [])
    elif inspect.isclass(found):
        assert callable(found())
    elif kind == "reward":
        assert found(None, "four") == 4.0


def test_what_a_module_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_of_test.py").write_text(
        "def reward(args, sample):\n    return 1.0\nclass Reward:\n    def __call__(self, args, sample):\n"
        "        return 2.0\nkept = Reward()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import mine_of_test  # type: ignore[import-not-found]

    file = str(tmp_path / "mine_of_test.py")
    assert spec_of("reward", mine_of_test.reward, tmp_path) == f"{file}:reward"
    assert spec_of("reward", mine_of_test.Reward, tmp_path) == f"{file}:Reward"
    spec = spec_of("reward", mine_of_test.kept, tmp_path)
    sys.modules.pop("mine_of_test")
    assert resolve("rewards", spec).obj(None, None) == 2.0
    assert spec_of("reward", Path("a.py"), tmp_path) == "a.py"


HOOK = """
from slime_core import hookimpl
class Counting:
    seen = []
    @hookimpl
    def slime_step_end(self, rollout_id, metrics):
        self.seen.append(rollout_id)
def slime_step_end(rollout_id, metrics):
    seen.append(rollout_id)
seen = []
"""


@pytest.mark.parametrize("form", ["class", "instance", "function", "kept"])
def test_hooks_of_a_script_are_a_plugin_directory(tmp_path: Path, form: str) -> None:
    from slime_core.plugins.discovery import add_directory
    from slime_core.plugins.manager import load_hook_module
    from slime_core.plugins.registry import Registry

    module: dict[str, Any] = {"__name__": "__main__"}
    exec(HOOK, module)
    given = {"class": module["Counting"], "instance": module["Counting"](), "function": module["slime_step_end"]}.get(
        form, module["Counting"]()
    )
    if form == "kept":
        given.lock = threading.Lock()
    registry = Registry()
    add_directory(registry, Path(hook_directory([given], tmp_path)))
    (ref,) = registry
    manager = bare_manager()
    plugin = load_hook_module(ref).obj
    manager.register(plugin)
    manager.hook.slime_step_end(rollout_id=3, metrics={})
    if form == "kept":
        assert plugin is given
    forget_registry()


@pytest.mark.parametrize("given", [lambda: None, object(), HELD])
def test_an_object_without_hooks_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"argument hooks .*: no function is marked @slime_core\.hookimpl"):
        hook_directory([given], tmp_path)
