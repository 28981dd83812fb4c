"""`--tools-path` and `--tool-call-parser`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slime_data.tool_parsers import tool_parser

from slime_core.config import Args
from slime_core.data.tools import run_tools
from slime_core.errors import ConfigError, PluginNotFoundError, PluginSignatureError

WEATHER = '''
def weather(city: str) -> str:
    """The weather of a city."""
    return city

async def news(topic: str) -> list[str]:
    """What is new."""
    return [topic]

tools = [weather, news]
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(WEATHER)
    return path


def args(*specs: object, **more: Any) -> Args:
    return Args(tools_path=[str(spec) for spec in specs], **more)


def tokenizer(template: Any) -> SimpleNamespace:
    return SimpleNamespace(chat_template=template)


def test_names_files_and_lists(file: Path) -> None:
    names = [tool.name for tool in run_tools(args(file, "calculator"))]
    assert names == ["weather", "news", "calculator"]
    assert [tool.name for tool in run_tools(args(f"{file}:news"))] == ["news"]
    assert run_tools(Args()) == ()


def test_what_is_no_tool(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("tool = 3\n")
    with pytest.raises(PluginSignatureError, match="expected a function, found int"):
        run_tools(args(path))
    path.write_text("def lookup(city):\n    return city\n")
    with pytest.raises(ConfigError, match=r"bad2.py'.*'city' has no annotation"):
        run_tools(args(path.rename(tmp_path / "bad2.py")))
    with pytest.raises(PluginNotFoundError, match=r"no tools? plugin 'calculatr'|Did you mean 'calculator'"):
        run_tools(args("calculatr"))


@pytest.mark.parametrize(
    "template",
    ["<tool_call>{}", [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "<tool_call>"}],
     {"tool_use": "<tool_call>"}],
)  # fmt: skip
def test_auto_takes_the_parser_that_claims_the_template(template: Any) -> None:
    assert type(tool_parser(Args(), tokenizer(template))).__name__ == "Hermes"


def test_auto_without_a_claimant() -> None:
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser auto: no installed parser claims .* name one of: .*glm45"
    ):
        tool_parser(Args(), tokenizer("{{ messages }}"))
    assert type(tool_parser(Args(), tokenizer(None), default="plain")).__name__ == "Plain"
