from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_core import distributions
from slime_core.config import Args
from slime_core.config.foreign import find_owners
from slime_core.distributions import AllowList, own_distributions
from slime_core.errors import PluginNotFoundError
from slime_core.plugins.manager import build_manager, current_registry
from slime_core.plugins.resolve import resolve

REWARD = "def reward(args, sample):\n    return 1.0\n"
NEAR = ("near", "Acme_Near")
OWN = ("exact", "slime-rl")
FILE = ("my_rm.py", "")


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, True),
        ("", False),
        ("near", True),
        ("acme-near", True),
        ("Acme_Near", True),
        ("Acme_Near:near", True),
        ("other, near", True),
        ("other", False),
    ],
)
def test_words_are_names_and_distributions(
    allowed: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if allowed is None:
        monkeypatch.delenv("SLIME_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("SLIME_PLUGINS", allowed)
    allow = AllowList.of()
    assert allow.allows(*NEAR) is expected
    assert allow.allows(*OWN)
    assert allow.allows(*FILE)


@pytest.mark.parametrize(("spelled", "told"), [("1", 0), ("y", 0), ("T", 0), ("2", 0), ("0", 1), ("no", 1)])
def test_owners_of_flags_are_left_out_in_safe_mode(
    spelled: str, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "acme_near-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme_Near\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[slime.foreign_flags]\nnear = no_such_module:flags\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SLIME_NO_PLUGINS", spelled)
    assert sum("Acme_Near" in warning for warning in find_owners([], os.environ)[1]) == told


def test_slimes_own_are_core_and_bundle_what_it_requires_of_slimes_and_the_checkouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {"slime-rl", "slime-rl-core", "slime-reward-math", "slime-estimators"} <= own_distributions()
    named = ["slime-model-Far_Away", 'slime-of-theirs; extra == "more"', 'pytest>=8; extra == "dev"', "numpy>=1.26"]
    monkeypatch.setattr(distributions, "installed", lambda name: SimpleNamespace(requires=named))
    own = own_distributions.__wrapped__()
    assert "slime-model-far-away" in own
    assert not own & {"pytest", "numpy", "slime-of-theirs"}


def test_what_is_left_out_is_as_if_not_installed_but_for_the_message(
    write_plugin, plugin_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plugin("acme-near", {"slime.rewards": {"near": "plug_acme_near:reward"}}, REWARD)
    write_plugin("acme-far", {"slime.rewards": {"far": "plug_acme_far:reward"}}, REWARD)
    monkeypatch.setenv("SLIME_PLUGIN_DIR", str(plugin_dir))
    monkeypatch.setenv("SLIME_PLUGINS", "far")
    assert "far" in current_registry().names("rewards")
    assert "near" not in current_registry().names("rewards")
    for spec in ("near", "acme-near:near"):
        with pytest.raises(
            PluginNotFoundError,
            match=r"^--rm-type: reward 'near' \(acme-near 1\.0\) is installed, but left out by SLIME_PLUGINS='far'\."
            r" To use it: SLIME_PLUGINS=far,near$",
        ):
            resolve("rewards", spec, origin="--rm-type")
    monkeypatch.setenv("SLIME_PLUGINS", "far,near")
    assert resolve("rewards", "near").obj(None, None) == 1.0


def test_safe_mode_starts_whatever_is_broken(
    write_plugin, plugin_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_plugin("acme-hooks", {"slime.plugins": {"watch": "plug_acme_hooks"}}, "1 / 0\n")
    write_plugin("acme-exact", {"slime.rewards": {"exact": "plug_acme_exact:reward"}}, REWARD)
    monkeypatch.setenv("SLIME_PLUGIN_DIR", f"{plugin_dir}:{tmp_path / 'gone'}")
    build_manager(Args(no_plugins=True))
    assert resolve("rewards", "exact").ref.distribution == "slime-rl"
    assert not current_registry().problems
