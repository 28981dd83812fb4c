"""Functions and arguments that `Trainer` takes, and those that it refuses."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slime_python.functions import hook_directory, spec_of
from slime_python.inputs import model_directory
from slime_testing_contracts.tiny import tiny_model

from slime_core import Trainer
from slime_core.errors import ConfigError, SlimeError
from slime_core.plugins.manager import bare_manager, forget_registry
from slime_core.plugins.resolve import resolve
from tests.sweeps import sweep

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


def test_a_model_that_cannot_be_saved_whole_leaves_nothing(tmp_path: Path) -> None:
    class Saved:
        def save_pretrained(self, folder: str) -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            Path(folder, "config.json").touch()

    class Unsaved:
        def save_pretrained(self, folder: str) -> None:
            raise OSError("the disk is full")

    for _ in range(2):
        with pytest.raises(ConfigError, match="model: could not be written: the disk is full"):
            model_directory(Saved(), Unsaved(), tmp_path / "model", resume=False)
    assert not list(tmp_path.iterdir())
    assert model_directory(Saved(), Saved(), tmp_path / "model", resume=True) == str(tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


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


ROWS = [{"input": f"{a}+1=?", "label": str(a + 1)} for a in range(8)]
SETTINGS: dict[str, Any] = {
    "num_rollout": 2, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "num_steps_per_rollout": 1,
    "apply_chat_template": True, "preflight": False, "num_threads": 1, "rollout_max_response_len": 8,
}  # fmt: skip
SECRET = "sk-of-the-test-0123456789abcdef"


def digits(args: Any, sample: Any) -> float:
    return sum(character.isdigit() for character in sample.response) / 8


async def keep(args: Any, samples: Any, **others: Any) -> bool:
    return True


class Locked:
    """A reward that no other process can have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, args: Any, sample: Any) -> float:
        return 0.0


def slime_step_ended(rollout_id: int, metrics: Any) -> None:
    """A function with no hook's name."""


MADE: list[tuple[dict[str, Any], str]] = [
    ({"lrr": 1e-5}, "argument lrr=1e-05: no such setting. Did you mean lr?"),
    ({"lr": "fast"}, "(argument lr): must be a number"),
    ({"lr": float("nan")}, "(argument lr): must be greater than or equal to 0"),
    ({"lr": lambda step: 1e-5}, "takes a value, no function; functions are taken by reward"),
    ({"n_samples_per_prompt": True}, "(argument n_samples_per_prompt): must be a number"),
    ({"num_rollout": None}, "--num-rollout N or --num-epoch N is required"),
    ({"global_batch_size": 5}, "drop one of the last two, or make the products equal"),
    ({"data": None}, "In Python: data=[...]"),
    ({"data": []}, "argument data: no rows; give a path, a list of dicts"),
    ({"data": {"input": "x"}}, "one mapping; expected a list of rows"),
    ({"data": [("a", "b")]}, "row 0 is tuple; expected a mapping of columns"),
    ({"data": [{"input": object()}]}, "argument data: row 0 cannot be written as JSON"),
    ({"prompt_data": "x.jsonl"}, "arguments data and prompt_data are the same setting; remove one"),
    ({"eval_data": []}, "argument eval_data eval: no rows; give a path"),
    ({"reward": None}, "In Python: reward=FUNCTION"),
    ({"reward": 3}, "argument reward 3: expected a name, a path, or a function, class or object"),
    ({"reward": [(digits, "heavy")]}, "type [REWARD, ...] or [(REWARD, WEIGHT), ...]"),
    ({"dynamic_filter": "a", "dynamic_sampling_filter_path": "b"}, "are the same setting; remove one"),
    ({"estimator": "grop"}, "(argument estimator): no estimators plugin 'grop'. Did you mean 'grpo'?"),
    ({"hooks": [object()]}, "Hooks: slime_register_components"),
    ({"hooks": slime_step_ended}, "Did you mean slime_step_end?"),
    ({"model": 5}, "argument model 5: expected a directory in Hugging Face layout"),
    ({"model": type("Model", (), {"save_pretrained": print})()}, "needs its tokenizer; add tokenizer=..."),
    ({"tokenizer": object()}, "the model is a directory, which has its own; leave tokenizer out"),
    ({"save": "a_file"}, "argument save 'a_file': a file; name a directory"),
    ({"resume": True}, "name the run to resume: Trainer(..., save=DIR, resume=True)"),
    ({"wandb_key": SECRET, "lr": "fast"}, "(argument lr): must be a number"),
]
"""Arguments -> end of the message: of the constructor, before anything is loaded."""
TRAINED: list[tuple[dict[str, Any], str]] = [
    ({"data": "no/such.jsonl"}, "no such file"),
    ({"data": [{"foo": "1"}]}, "no column 'input' (--input-key), nor one that is recognised; the row has: foo"),
    ({"reward": "maht"}, "(argument reward): no rewards plugin 'maht'. Did you mean 'math'?"),
    ({"reward": lambda: 1.0}, "expected [async] (args, sample[, evaluation], **kwargs) -> float"),
    ({"generate": lambda args, sample, sampling_params: sample}, "Make it `async def`"),
    ({"environment": digits, "generate": "multi_turn"}, "expected a class with [async] reset(self, sample[, seed])"),
    ({"dynamic_filter": keep}, "Make it a plain `def`"),
    ({"rollout_engine": "sglnag"}, "Did you mean 'sglang'?"),
    ({"model": "a_directory"}, "no HF-layout model there (no config.json)"),
    ({"save": "taken"}, "In Python: overwrite=True"),
]
"""Arguments -> end of the message of `train`, which comes before a process, an engine or a model."""
CALLED: list[tuple[Callable[[Trainer], Any], str]] = [
    (lambda t: Trainer(str(tiny_model()), ROWS), "name it, as in Trainer(model, data=...)"),
    (lambda t: t.update(None), "type batch = trainer.rollout()"),
    (lambda t: t.sync(), "type batch = trainer.rollout()"),
    (lambda t: t.change(rollout_batch_size=8), "These may: lr, "),
    (lambda t: t.change(lrr=8), "Did you mean lr?"),
    (lambda t: t.change(lr="fast"), "(argument lr): must be a number"),
    (lambda t: t.change(plugins={"stratified": {"look_ahead": 3}}), "stratified.shares may"),
    (lambda t: setattr(t, "lr", 1e-3), "type trainer.change(lr=0.001)"),
    (lambda t: t.save("model"), "nothing has been committed yet; train first"),
    (lambda t: t.save("taken"), "the directory exists; name a new one"),
    (lambda t: t.evaluate(), "type evaluate(data), or give the Trainer eval_data"),
    (lambda t: t.evaluate(ROWS, lrr=3), "Did you mean lr?"),
    (lambda t: t.generate("1+1"), "type generate([prompt])"),
    (lambda t: t.generate(["1+1"], temprature=0.0), "Did you mean 'temperature'?"),
    (lambda t: t.run, "type trainer.train()"),
    (lambda t: Trainer.from_yaml("bad.yaml"), "not valid YAML"),
    (lambda t: Trainer.from_yaml("none.yaml"), "no such file"),
    (lambda t: Trainer.from_yaml("typo.yaml"), "add it, or type Trainer.from_yaml(path, model=...)"),
    (lambda t: Trainer.from_yaml("typo.yaml", model=str(tiny_model())), "Did you mean lr?"),
    (lambda t: Trainer(str(tiny_model()), data=ROWS, reward=Locked(), **SETTINGS).to_yaml("a.yaml"), "reward Locked"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (tmp_path / "a_file").write_text("x")
    (tmp_path / "bad.yaml").write_text("lr: [1\n")
    (tmp_path / "typo.yaml").write_text("lrr: 1.0\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "a_directory").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("{}\n")
    return tmp_path


def made(**changes: Any) -> Trainer:
    return Trainer(**{"model": str(tiny_model()), "data": ROWS, "reward": digits, **SETTINGS, **changes})


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def check(call: Callable[[], Any], end: str) -> None:
    before, threads = children(), threading.enumerate()
    with pytest.raises(SlimeError) as raised:
        call()
    last = str(raised.value).splitlines()[-1]
    assert end in last
    assert SECRET not in str(raised.value)
    started = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not [name for name in started if name.startswith("slime-")]
    assert children() <= before


@sweep("arguments, end", MADE)
def test_wrong_arguments(folder: Path, arguments: dict[str, Any], end: str) -> None:
    check(lambda: made(**arguments), end)
    assert not [*folder.glob("outputs/*")]


@sweep("arguments, end", TRAINED)
def test_wrong_components(folder: Path, arguments: dict[str, Any], end: str) -> None:
    check(lambda: made(**arguments).train(), end)


@sweep("call, end", CALLED)
def test_wrong_calls(folder: Path, call: Callable[[Trainer], Any], end: str) -> None:
    trainer = made()
    check(lambda: call(trainer), end)
