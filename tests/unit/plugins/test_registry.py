from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import slime_core
from slime_core.errors import PluginConflictError, PluginNotFoundError
from slime_core.plugins.registry import RANK_CHECKOUT, RANK_EXPLICIT, ComponentRef, Registry, source_hash


def ref(name: str, distribution: str, **more: object) -> ComponentRef:
    return ComponentRef("rewards", name, f"{distribution}:reward", distribution=distribution, **more)  # type: ignore[arg-type]


def test_two_distributions_with_one_name_are_an_error_only_when_it_is_asked_for() -> None:
    registry = Registry()
    registry.add(ref("math", "one", version="1.0"))
    registry.add(ref("math", "two", version="2.0"))
    registry.add(ref("exact", "two"))
    assert registry.get("rewards", "exact").distribution == "two"
    with pytest.raises(PluginConflictError, match=r"one 1\.0 .* and two 2\.0 .* 'one:math' or 'two:math'"):
        registry.get("rewards", "math")
    assert registry.get("rewards", "math", distribution="two").version == "2.0"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_copies_of_one_distribution_are_one_plugin_and_the_explicit_one_wins(order: tuple[int, ...]) -> None:
    copies = [
        ref("math", "slime_reward.math", version="explicit", rank=RANK_EXPLICIT),
        ref("math", "slime-reward-math", version="installed"),
        ref("math", "Slime-Reward-Math", version="checkout", rank=RANK_CHECKOUT),
    ]
    registry = Registry()
    for i in order:
        registry.add(copies[i])
    assert registry.get("rewards", "math").version == "explicit"
    assert len(list(registry)) == 1


def test_not_found_suggests_and_lists() -> None:
    registry = Registry()
    registry.add(ref("length_penalty", "one"))
    with pytest.raises(PluginNotFoundError, match=r"Did you mean 'length_penalty'\? Installed: length_penalty"):
        registry.get("rewards", "length-penality")
    with pytest.raises(PluginNotFoundError, match=r"its path: FILE.py:NAME. Installed: length_penalty$"):
        registry.get("rewards", "zzz_q")
    with pytest.raises(PluginNotFoundError, match=r"from 'two'. one offers it"):
        registry.get("rewards", "length_penalty", distribution="two")


def test_without_the_bundle_a_name_that_is_not_found_says_what_brings_slimes_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime_core.plugins.registry.installed", lambda name: None)
    registry = Registry()
    registry.add(ComponentRef("buffers", "lifo", "m:f", distribution="acme"))
    for name, close in (("fifo", "Did you mean 'lifo'?"), ("priority", "One of yours has its path: FILE.py:NAME.")):
        with pytest.raises(PluginNotFoundError) as caught:
            registry.get("buffers", name)
        own = "slime's own come with: pip install slime-rl."
        assert str(caught.value) == f"no buffers plugin {name!r}. {close} {own} Installed: lifo"


def test_the_source_hash_covers_a_plugins_package_and_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "thing"
    (package / "inner").mkdir(parents=True)
    for file in ("__init__.py", "core.py", "inner/__init__.py"):
        (package / file).write_text("")
    (tmp_path / "beside.py").write_text("")
    entry = package / "__init__.py"
    before = source_hash(entry, "slime-reward-thing"), source_hash(entry)
    (tmp_path / "beside.py").write_text("changed = 1\n")
    assert (source_hash(entry, "slime-reward-thing"), source_hash(entry)) == before
    (package / "inner" / "__init__.py").write_text("changed = 1\n")
    assert source_hash(entry, "slime-reward-thing") != before[0]
    assert source_hash(entry) == before[1]  # a user's own file has neighbours of its own
    core = Path(slime_core.__file__).with_name("loop.py")
    assert source_hash(core, "slime-rl") == hashlib.sha256(core.read_bytes()).hexdigest()
    own = (
        source_hash(package / "core.py", "slime-rewards"),
        source_hash(package / "inner" / "__init__.py", "slime-rewards"),
    )
    (package / "other.py").write_text("")  # another component of the kind
    (package / "inner" / "part.py").write_text("")
    assert source_hash(package / "core.py", "slime-rewards") == own[0]
    assert source_hash(package / "inner" / "__init__.py", "slime-rewards") != own[1]
