"""A session's paths of turns -> trajectories: what is held is appended to, realigned, or left for a new trajectory.

`server.AgentServer.finish_session` calls it once. The tokens so far are compared with the prompt of the next turn::

    held      P P P | S S S |                     P P P | S S S |                  P P P | S S S |
    prompt    P P P   S S S   T T                 P P P   S X X T T                P P X   ...
              all of it: CLEAN, append T T        inside the last answer, which    anywhere else: FORK, the trajectory
              and the answer                      is short: REALIGN, S X X is      ends here and the prompt begins
                                                  context in its place             the next one

An answer that several paths share is trained in the first of them only; the others begin with it in their prompt, where
nothing is trained. So every sampled answer is trained exactly once, or dropped by a realignment, and that is noted in
`metadata["lossy"]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slime_agent_base_url.trajectory import Trajectory
from slime_agent_base_url.tree import Turn
from slime_core.protocols import Args
from slime_core.provenance import Source


class Step(StrEnum):
    """How a turn's prompt relates to the tokens held before it."""

    CLEAN = "clean"
    REALIGN = "realign"
    FORK = "fork"


@dataclass
class Line:
    """One trajectory, and the turns that it trains on."""

    trajectory: Trajectory
    turns: list[Turn]
    steps: list[Step] = field(default_factory=list)
    """Of each turn after the first."""


def linearise(paths: Iterable[list[Turn]], *, fork_threshold: int, args: Args | None = None) -> list[Line]:
    """The trajectories of all paths, in the order of `paths`; each with at least one trained token.

    Args:
        paths: Turns from a root to a leaf each (`MessageTree.paths`).
        fork_threshold: An answer of fewer tokens may be dropped by a realignment; another one makes a fork.
        args: The run's settings, for `Trajectory`.

    Raises:
        ValueError: A turn's log-probs or versions do not fit its tokens.
    """
    lines: list[Line] = []
    seen: set[int] = set()
    for path in paths:
        turns = [turn for turn in path if id(turn) not in seen]  # those seen are the beginning of the path
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
    """How the turn's prompt goes on from `held`, which is the prompt and the answer of `last`."""
    if turn.prompt.held is last:
        return Step.CLEAN  # made of these very tokens: a long conversation is not compared at each of its turns
    tokens, prompt = held.tokens, turn.prompt.ids
    if tokens == prompt[: len(tokens)]:
        return Step.CLEAN
    answer = len(last.output.token_ids)
    before = len(tokens) - answer
    same = len(prompt) >= before and tokens[:before] == prompt[:before]
    return Step.REALIGN if same and answer < fork_threshold else Step.FORK


def _begun(turn: Turn, args: Args | None) -> Trajectory:
    """A trajectory of the turn's prompt."""
    trajectory = Trajectory(args)
    trajectory.add(turn.prompt.ids, Source.TEMPLATE)
    trajectory.prompt_length = len(trajectory)
    return trajectory


def _extend(line: Line, turn: Turn) -> None:
    """Add what stands between the last answer and the turn's, with its sources where they are known."""
    if turn.prompt.held is line.turns[-1]:
        for ids, source in turn.prompt.new:
            line.trajectory.add(ids, source)
    else:
        line.trajectory.add(turn.prompt.ids[len(line.trajectory) :], Source.TEMPLATE)
