"""The table of THUDM/slime's flags says what is."""

from __future__ import annotations

import re

import pytest

from slime_core.config.flags import SettingsParser
from slime_core.config.foreign import Lists, find_owners
from slime_core.config.spec import flag_specs
from slime_core.config.support import UNSUPPORTED
from slime_core.errors import ConfigError
from tests.as_written.flags import DIFFERENCES, NEWER, verdicts


def test_differences_are_of_flags_that_are_obeyed() -> None:
    names = {flag[2:].replace("-", "_") for flag in DIFFERENCES}
    assert names <= set(flag_specs())
    assert not names & set(UNSUPPORTED)
    assert {verdict.kind for verdict in verdicts().values()} == {"works", "differs", "refused"}
    assert not {flag for flag, verdict in verdicts().items() if verdict.kind != "works" and not verdict.why}


def test_newer_flags_are_errors() -> None:
    owners, _ = find_owners(["--no-plugins"], {})
    for flag in NEWER:
        with pytest.raises(ConfigError, match=re.escape(f"unknown flag {flag}")):
            SettingsParser(owners).read_foreign([flag, "1"], Lists(owners, {}), [flag, "1"])


def test_what_an_error_says_to_type_instead_of_a_refused_flag_is_there() -> None:
    refused = {flag: verdict.why for flag, verdict in verdicts().items() if verdict.kind == "refused"}
    assert "--rollout-buffer-url" in refused
    typed = {flag for why in refused.values() for flag in re.findall(r"--[a-z0-9-]+", why)}
    assert typed <= {spec.flag for spec in flag_specs().values()}
