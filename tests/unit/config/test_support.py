"""No setting is ignored silently: what nothing reads is in the table of settings without effect."""

from __future__ import annotations

import re
from pathlib import Path

from slime_core.config.spec import flag_specs
from slime_core.config.support import UNSUPPORTED

ROOT = Path(__file__).resolve().parents[3]
FOR_USERS_FUNCTIONS = {"rm_url"}
"""Settings that only plugins and users' own functions read."""


def _words() -> set[str]:
    config = ROOT / "slime_core" / "config"
    silent = {*(config / "sections").glob("*.py"), config / "support.py"}
    files = [f for f in (ROOT / "slime_core").rglob("*.py") if f not in silent]
    return {word for f in files for word in re.findall(r"[a-z_][a-z_0-9]*", f.read_text())}


def test_every_setting_is_read_or_said_to_be_without_effect() -> None:
    words = _words()
    unread = {name for name in flag_specs() if name not in words}
    assert unread - set(UNSUPPORTED) - FOR_USERS_FUNCTIONS == set()


def test_settings_without_effect_are_not_read_by_the_loop() -> None:
    text = "\n".join(
        f.read_text() for f in (ROOT / "slime_core").rglob("*.py") if "config" not in f.relative_to(ROOT).parts[:2]
    )
    read = set(re.findall(r"\bargs\.([a-z_0-9]+)", text)) & set(UNSUPPORTED)
    assert read == set()
