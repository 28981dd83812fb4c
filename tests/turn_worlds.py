"""An environment with turns that are paid in two parts, and a fan-out of its episodes, as files of a user."""

from __future__ import annotations

WORLD = '''
from slime_core import Step

class Environment:
    """Three turns, or one where the first action has no digit; every turn is paid, in two parts."""

    def __init__(self, args):
        self.steps = 0

    def reset(self, sample):
        self.steps = 0

    def step(self, action):
        self.steps += 1
        digits, short = sum(c.isdigit() for c in action) / 2, float(len(action) < 3)
        done = self.steps == 3 or (self.steps == 1 and not digits)
        parts = {"digits": digits, "short": short}
        return Step(f"{self.steps}+1=", reward=digits + short, done=done, components=parts)

    def snapshot(self):
        return self.steps

    def restore(self, sample, state):
        self.steps = state

    def close(self):
        pass
'''
FAN_OUT = '''
import copy
from slime_core import Sample
from slime_generators.multi_turn import generate as play

async def generate(args, sample, sampling_params, *, context):
    """Every third episode becomes two training samples."""
    played = await play(args, sample, sampling_params, context=context)
    if played.status == Sample.Status.ABORTED or sample.index % 3:
        return played
    return [played, copy.deepcopy(played)]

generate.traits = play.traits
'''
