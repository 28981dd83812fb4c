"""Hooks that functions with THUDM/slime's arguments implement, as flags have them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_core.plugins.hooks import Hooks, bare_manager, implement
from slime_core.plugins.kinds import hook_flags


def hooks_with(*functions: tuple[str, Callable[..., Any]]) -> Hooks:
    """(Hook, function) pairs; errors call each by its hook's flag."""
    manager = bare_manager()
    for hook, function in functions:
        row = hook_flags()[hook]
        implement(manager, row, function, row.flags[0])
    return Hooks(manager)
