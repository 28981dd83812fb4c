from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from slime_core.errors import PluginIncompatibleError
from slime_core.plugins.compat import check_compatible
from slime_core.plugins.registry import ComponentRef


def ref(*requires: str) -> ComponentRef:
    return ComponentRef("rewards", "f1", "m:f", distribution="slime-reward-f1", version="0.1.0", requires=requires)


@pytest.mark.parametrize(
    "requires",
    [(), ("slime-rl",), ("slime-rl>=0.3,<0.4",), ("Slime_RL >=0.1",), ("torch>=99",), ("slime-rl>=9; extra == 'x'",)],
)
def test_what_fits(requires: tuple[str, ...]) -> None:
    check_compatible(ref(*requires), running="0.3.0")
    check_compatible(ref(*requires), running="0.3.1.dev4")


def test_what_does_not_fit_names_both() -> None:
    with pytest.raises(
        PluginIncompatibleError,
        match=r"reward 'f1' \(slime-reward-f1 0\.1\.0\) needs slime-rl>=0\.9, but slime-rl 0\.3\.0 is running",
    ):
        check_compatible(ref("slime-rl>=0.9"), running="0.3.0")
    with pytest.raises(
        PluginIncompatibleError, match=r"^--rm-type \(flag\): reward 'f1'.*To mend it: pip install --upgrade"
    ):
        check_compatible(ref("slime-rl>=0.9"), running="0.3.0", origin="--rm-type (flag)")


def test_a_malformed_requirement_is_named() -> None:
    with pytest.raises(PluginIncompatibleError, match="malformed requirement 'slime-rl >> 3'") as caught:
        check_compatible(ref("slime-rl >> 3"))
    assert "\n" not in str(caught.value)
    assert "pip install --upgrade slime-reward-f1" in str(caught.value)


def test_only_requirements_on_slime_are_parsed() -> None:
    """Every command checks its hook modules at its start, and the core alone has a hundred requirements."""
    program = (
        "from packaging.requirements import Requirement as R; init, seen = R.__init__, []\n"
        "R.__init__ = lambda self, text: seen.append(text) or init(self, text)\n"
        "from slime_core.plugins.manager import build_manager; build_manager()\n"
        "assert all('slime' in text for text in seen), seen"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mixed = ref("torch @@ broken", "slime-rl<0.0.1")
    with pytest.raises(PluginIncompatibleError, match=r"needs slime-rl<0\.0\.1"):
        check_compatible(mixed)
    check_compatible(replace(mixed, distribution="slime_rl_core"))
