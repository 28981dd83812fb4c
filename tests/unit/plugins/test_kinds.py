from __future__ import annotations

import pytest

from slime_core.errors import PluginNotFoundError
from slime_core.plugins.kinds import KINDS, function_flags, kind_of


def test_singular_and_plural_name_the_same_kind() -> None:
    for kind in KINDS.values():
        assert kind_of(kind.name) is kind_of(kind.singular) is kind
        assert kind.group == f"slime.{kind.name}"


def test_functions_of_flags_share_one_group() -> None:
    for row in function_flags().values():
        assert kind_of(row.name) is kind_of(row.singular) is row
        assert (row.group, row.registered) == ("slime.functions", "functions")


def test_an_unknown_kind_is_answered_with_a_suggestion() -> None:
    with pytest.raises(PluginNotFoundError, match=r"no plugin kind 'rewrads'. Did you mean 'rewards'\?"):
        kind_of("rewrads")
