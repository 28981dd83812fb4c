"""A session's paths of turns -> trajectories: a turn extends, realigns or leaves the trajectory held so far.

`server.AgentServer.finish_session` calls it once. The tokens so far are compared with the prompt of the next turn::

    held      P P P | S S S |                     P P P | S S S |                  P P P | S S S |
    prompt    P P P   S S S   T T                 P P P   S X X T T                P P X   ...
              all of it: CLEAN, append T T        inside the last answer, which    anywhere else: FORK, the trajectory
              and the answer                      is short: REALIGN, S X X is      ends here and the prompt begins
                                                  context in its place             the next one

An answer that several paths share is trained in the first path only; the other paths have it in their prompt, which is
not trained. So every sampled answer is trained exactly once, or dropped by a realignment and noted in
`metadata["lossy"]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slime_agent_base_url.trajectory import Trajectory
from slime_agent_base_url.tree import Turn
from slime_core.protocols import Args
from slime_core.sample.provenance import Source


class Step(StrEnum):
    """The relation of a turn's prompt to the tokens held before it."""

    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


@dataclass
class Line:
    """A trajectory, and the turns that it trains on."""

    trajectory: Trajectory
    turns: list[Turn]
    steps: list[Step] = field(default_factory=list)
    """Relation of each turn after the first to the turn before."""


def linearise(paths: Iterable[list[Turn]], *, fork_threshold: int, args: Args | None = None) -> list[Line]:
    """Return the trajectories of all paths, in the order of `paths`; each has at least one trained token.

    Args:
        paths: Paths of turns from a root to a leaf (`MessageTree.paths`).
        fork_threshold: A realignment may drop an answer of fewer tokens; a longer answer makes a fork.
        args: The run's settings, for `Trajectory`.

    Raises:
        ValueError: A turn's log-probs or versions do not fit its tokens.
    """
    lines: list[Line] = []
    seen: set[int] = set()
    for path in paths:
        turns = [turn for turn in path if id(turn) not in seen]  # seen turns are the beginning of the path
        seen.update(map(id, turns))
        lines += _lines(turns, fork_threshold, args)
    return [line for line in lines if any(line.trajectory.loss_mask)]


def _lines(turns: Sequence[Turn], fork_threshold: int, args: Args | None) -> list[Line]:
    lines: list[Line] = []
    for turn in turns:
        step = relation(lines[-1].trajectory, lines[-1].turns[-1], turn, fork_threshold) if lines else Step.FORK
        if step is Step.FORK:
            lines.append(Line(_begun(turn, args), []))
        elif step is Step.CLEAN:
            _extend(lines[-1], turn)
        else:
            trajectory, last = lines[-1].trajectory, lines[-1].turns.pop()
            start = len(trajectory) - len(last.output.token_ids)
            trajectory.replace_lossy(start, turn.prompt.ids[start:], "the client rewrote an answer")
        lines[-1].steps += [step] if lines[-1].turns or step is Step.REALIGN else []
        lines[-1].trajectory.add_sampled(turn.output)
        lines[-1].turns.append(turn)
    return lines


def relation(held: Trajectory, last: Turn, turn: Turn, fork_threshold: int) -> Step:
    """Return how the turn's prompt continues `held`, which is the prompt and the answer of `last`."""
    if turn.prompt.held is last:
        return Step.CLEAN  # built from the same tokens, so a long conversation is not compared at each turn
    tokens, prompt = held.tokens, turn.prompt.ids
    if tokens == prompt[: len(tokens)]:
        return Step.CLEAN
    answer = len(last.output.token_ids)
    before = len(tokens) - answer
    same = len(prompt) >= before and tokens[:before] == prompt[:before]
    return Step.REALIGN if same and answer < fork_threshold else Step.FORK


def _begun(turn: Turn, args: Args | None) -> Trajectory:
    """Return a trajectory of the turn's prompt."""
    trajectory = Trajectory(args)
    trajectory.add(turn.prompt.ids, Source.TEMPLATE)
    trajectory.prompt_length = len(trajectory)
    return trajectory


def _extend(line: Line, turn: Turn) -> None:
    """Add the tokens between the last answer and the turn's answer, with their sources if known."""
    if turn.prompt.held is line.turns[-1]:
        for ids, source in turn.prompt.new:
            line.trajectory.add(ids, source)
    else:
        line.trajectory.add(turn.prompt.ids[len(line.trajectory) :], Source.TEMPLATE)
