from __future__ import annotations

from typing import Any, ClassVar

from slime_testing_contracts import GeneratorContract


class TestOneRole(GeneratorContract):
    component = "multi_agent"
    args: ClassVar[dict[str, Any]] = {
        "plugins": {"multi_agent": {"roles": [{"name": "solver"}], "order": ["solver"]}},
    }


class TestARoleThatSpeaksTwice(GeneratorContract):
    component = "multi_agent"
    args: ClassVar[dict[str, Any]] = {
        "plugins": {
            "multi_agent": {
                "roles": [{"name": "solver", "again": "Are you sure of {solver}?"}],
                "order": ["solver", "solver"],
            }
        },
    }
    script = ("3", r"\boxed{2}")
