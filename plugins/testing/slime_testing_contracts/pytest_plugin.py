"""slime's pytest plugin: contract suites for components named on the command line, and fixtures.

    pytest --pyargs slime_testing_contracts.components --slime-component rewards:./my_rm.py:reward

pytest loads this module (entry point `pytest11`) in every run of an environment that has slime. So the import must be
cheap: no torch, no pydantic, and no contract suite before pytest can rewrite its assertions. The components become test
classes when pytest collects `components.py`, not here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from slime_testing_probes.scripted import ScriptedEngine

    from slime_testing_contracts.loop import LoopRun

_HOOK_WORDS = ("hooks", "hook", "plugins", "plugin", "slime.plugins")
EXAMPLE = "--slime-component rewards:./my_rm.py:reward"


class Requested(NamedTuple):
    """A component named on the command line for testing."""

    kind: str
    spec: str
    settings: dict[str, Any]
    """Settings from `--slime-args`."""


class _Asked:
    """Components of the current pytest run; `components.py` reads them when it is imported."""

    components: tuple[Requested, ...] = ()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name components and their settings."""
    group = parser.getgroup("slime", "contract suites: --pyargs slime_testing_contracts.components")
    group.addoption(
        "--slime-component",
        action="append",
        default=[],
        metavar="KIND:SPEC",
        help="component to test, e.g. rewards:./my_rm.py:reward or filters:nonzero_std; may be repeated",
    )
    group.addoption(
        "--slime-args",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the components, e.g. reward_key=score or plugins.near.tolerance=0.1; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read the options; a wrong one ends pytest before anything is collected."""
    _Asked.components = ()
    components, settings = config.getoption("--slime-component"), config.getoption("--slime-args")
    if settings and not components:
        raise pytest.UsageError(f"--slime-args are settings of components, and there is none: add {EXAMPLE}")
    if components:
        from slime_core.plugins.resolve import absolute_spec

        given = _settings(settings)
        directory = config.invocation_params.dir
        split = [_split(text) for text in components]
        _Asked.components = tuple(Requested(kind, absolute_spec(spec, directory), given) for kind, spec in split)
    config.addinivalue_line("markers", "slime_only_where(holds): of a contract, for the components that it holds of")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out the tests of a suite that are not for its component."""
    marked = [item for item in items if item.get_closest_marker("slime_only_where")]
    if marked:
        from slime_testing_contracts.base import applies

        left_out = {item for item in marked if not applies(item)}
        items[:] = [item for item in items if item not in left_out]


def requested() -> tuple[Requested, ...]:
    """Return the components of this run. Raises pytest.Collector.CollectError if no component is named."""
    if not _Asked.components:
        raise pytest.Collector.CollectError(f"name what to test: {EXAMPLE}")
    return _Asked.components


def _split(text: str) -> tuple[str, str]:
    """Return kind and spec."""
    from slime_core.errors import PluginNotFoundError
    from slime_core.plugins.kinds import HOOK_GROUP, kind_of

    kind, colon, spec = text.partition(":")
    if not colon or not spec:
        raise pytest.UsageError(f"--slime-component {text!r}: write KIND:SPEC, e.g. {EXAMPLE}")
    try:
        return HOOK_GROUP if kind in _HOOK_WORDS else kind_of(kind).name, spec
    except PluginNotFoundError as error:
        raise pytest.UsageError(f"--slime-component {text!r}: {error}") from None


def _settings(texts: list[str]) -> dict[str, Any]:
    """Convert `a.b=1` to {"a": {"b": 1}}; values as in YAML."""
    import yaml

    settings: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        *path, last = key.strip().replace("-", "_").split(".") if not key.startswith("plugins.") else key.split(".")
        if not equals or not last:
            raise pytest.UsageError(f"--slime-args {text!r}: write KEY=VALUE, e.g. reward_key=score")
        inner = settings
        for name in path:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise pytest.UsageError(f"--slime-args {text!r}: {name!r} has a value already")
        try:
            inner[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise pytest.UsageError(f"--slime-args {text!r}: not a YAML value: {reason}") from None
    return settings


# -- fixtures --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    """A HF-layout directory with a random model of 330k parameters, made once; copy it before you change it."""
    from slime_testing_contracts.tiny import tiny_model

    return tiny_model()


@pytest.fixture
def scripted_engine() -> Callable[..., ScriptedEngine]:
    """`scripted_engine("one", "two")` or `scripted_engine(function)`: an engine that answers just that."""
    from slime_testing_probes.scripted import ScriptedEngine

    def make(*script: Any, **keywords: Any) -> ScriptedEngine:
        function = len(script) == 1 and callable(script[0])
        return ScriptedEngine(script[0] if function else list(script), **keywords)

    return make


@pytest.fixture
def run_loop(tmp_path: Path) -> Callable[..., LoopRun]:
    """`run_loop(steps=3, custom_rm_path="my_rm.py")`: a real training run in this process; see `LoopRun`."""
    from slime_testing_contracts.loop import run_loop

    count = 0

    def run(steps: int = 3, **settings: Any) -> LoopRun:
        nonlocal count
        count += 1
        return run_loop(tmp_path / f"loop-{count}", steps, **settings)

    return run
