from __future__ import annotations

import pytest

from slime_core.errors import PluginNotFoundError
from slime_core.plugins.kinds import KINDS, kind_of


def test_singular_and_plural_name_the_same_kind() -> None:
    for kind in KINDS.values():
        assert kind_of(kind.name) is kind_of(kind.singular) is kind
        assert kind.group == f"slime.{kind.name}"


def test_an_unknown_kind_is_answered_with_a_suggestion() -> None:
    with pytest.raises(PluginNotFoundError, match=r"no plugin kind 'rewrads'. Did you mean 'rewards'\?"):
        kind_of("rewrads")
