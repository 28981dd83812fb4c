"""The test kit for plugin authors: a contract suite per kind, and an engine that follows a script.

Subclass a contract in a test file, name the component, add examples; pytest runs the suite::

    from slime_core.testing import RewardContract

    class TestMath(RewardContract):
        component = "math"
        examples = [("1+1=", r"\\boxed{2}", "2", 1.0), ("1+1=", r"\\boxed{3}", "2", 0.0)]

slime's own plugins are held to the same suites. Needs pytest, and torch for estimators and models only.
"""

from slime_core.testing.contracts.base import Contract
from slime_core.testing.contracts.buffer import BufferContract
from slime_core.testing.contracts.estimator import EstimatorContract
from slime_core.testing.contracts.filter import FilterContract
from slime_core.testing.contracts.generator import GeneratorContract
from slime_core.testing.contracts.model import ModelContract
from slime_core.testing.contracts.reward import RewardContract
from slime_core.testing.scripted import CharTokenizer, Reply, Request, ScriptedEngine

__all__ = [
    "BufferContract",
    "CharTokenizer",
    "Contract",
    "EstimatorContract",
    "FilterContract",
    "GeneratorContract",
    "ModelContract",
    "Reply",
    "Request",
    "RewardContract",
    "ScriptedEngine",
]
