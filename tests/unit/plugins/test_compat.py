from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from slime_commands.plugins.checking import missing_requirements

import slime_core
from slime_core.errors import PluginIncompatibleError
from slime_core.plugins import kinds
from slime_core.plugins.registry import ComponentRef
from slime_core.plugins.resolve import check_api, resolve

ROW = replace(kinds.KINDS["rewards"], api=3, deprecated=(2,))
REF = ComponentRef("rewards", "f1", "m:f", distribution="acme-f1", version="0.1.0")


class Two:
    slime_api = 2


def module(**names: object) -> ModuleType:
    made = ModuleType("m")
    vars(made).update(names)
    return made


def test_one_too_old_is_said_and_loaded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check_api(ROW, Two, module(), REF, "--rm-type (flag)")
    assert caplog.messages == [
        "--rm-type (flag): reward 'f1' (acme-f1 0.1.0) is written for version 2 of the API of rewards, which goes in"
        f" the next version; slime-rl-core {slime_core.__version__} has 3. To mend it: install acme-f1 again, from"
        " where it came; docs/plugins/index.md says what has changed, and slime_api = 3 that it is done"
    ]


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (
            {},
            r"written for version 1 of the API of rewards, slime-rl-core \S+ has 3\. To mend it: install acme-f1 again",
        ),
        ({"slime_api": 4}, r"version 4 of .* has 3\. To have it: pip install --upgrade slime-rl-core$"),
        ({"slime_api": "2"}, r"slime_api is '2'; expected a number, such as 3$"),
        ({"slime_api": True}, "slime_api is True; expected a number"),
    ],
)
def test_what_does_not_fit_names_both_and_what_to_type(names: dict[str, object], what: str) -> None:
    with pytest.raises(PluginIncompatibleError, match=rf"^reward 'f1' \(acme-f1 0\.1\.0\).*{what}"):
        check_api(ROW, object(), module(**names), REF)


@pytest.mark.parametrize("spec", ["{file}", "{file}:reward", "plug_api_here.reward", "plug_api_here:reward"])
def test_every_form_of_a_spec_is_checked(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plug_api_here.py"
    file.write_text("slime_api = 99\ndef reward(args, sample):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        PluginIncompatibleError, match=r"^--rm: reward .*plug_api_here.* version 99 of the API of rewards"
    ):
        resolve("rewards", spec.format(file=file), origin="--rm")


def test_requirements_are_pips_and_what_was_installed_past_them_is_found() -> None:
    wanted = ("slime-rl-core<0.0.1", "Slime_RL_Core", "pytest<1", "no-such-thing", "x>=9; extra == 'e'", "torch @@ bad")
    found = missing_requirements(replace(REF, requires=wanted))
    assert [name for name, _ in found] == ["slime-rl-core<0.0.1", "pytest<1", "no-such-thing"]
    assert found[0][1] == slime_core.__version__
    assert found[2][1] == ""


def test_the_page_says_which_versions_there_are() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "plugins" / "index.md").read_text()
    raised = {kind.name for kind in kinds.KINDS.values() if kind.api != 1}
    assert ("All kinds are at version 1." in page) == (not raised), (
        f"say in docs/plugins/index.md what changed: {raised}"
    )
