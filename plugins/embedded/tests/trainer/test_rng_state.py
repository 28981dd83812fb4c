from __future__ import annotations

import json
import random

import numpy as np
import torch
from slime_embedded.trainer.state_files import capture_rng, restore_rng


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))]


def test_every_generator_goes_on_where_it_was() -> None:
    random.gauss(0, 1)  # leaves a second normal number in waiting, which the state must carry
    np.random.randn()
    state = json.loads(json.dumps(capture_rng()))
    expected = draw() + draw()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    restore_rng(state)
    assert draw() + draw() == expected
