"""The table of THUDM/slime's flags says what is."""

from __future__ import annotations

import re

import pytest

from slime_core.cli.check import check_flags
from slime_core.config.spec import flag_specs
from slime_core.config.support import UNSUPPORTED
from slime_core.errors import ConfigError
from tests.as_written.flags import DIFFERENCES, NEWER, verdicts
from tests.as_written.launch_scripts import launch_scripts


def test_differences_are_of_flags_that_are_obeyed() -> None:
    names = {flag[2:].replace("-", "_") for flag in DIFFERENCES}
    assert names <= set(flag_specs())
    assert not names & set(UNSUPPORTED)
    assert {verdict.kind for verdict in verdicts().values()} == {"works", "differs", "refused"}
    assert not {flag for flag, verdict in verdicts().items() if verdict.kind != "works" and not verdict.why}


@pytest.mark.parametrize("flag", NEWER)
def test_newer_flags_are_errors(flag: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown flag {flag}")):
        check_flags([*launch_scripts()["scripts_run-qwen3-4B.sh"], flag, "1"])


def test_what_an_error_says_to_type_instead_of_a_refused_flag_is_there() -> None:
    refused = {flag: verdict.why for flag, verdict in verdicts().items() if verdict.kind == "refused"}
    assert "--rollout-buffer-url" in refused
    typed = {flag for why in refused.values() for flag in re.findall(r"--[a-z0-9-]+", why)}
    assert typed <= {spec.flag for spec in flag_specs().values()}
