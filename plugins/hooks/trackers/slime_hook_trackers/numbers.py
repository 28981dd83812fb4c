"""What trackers are told besides metrics: distributions and texts of a rollout, and the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slime_core import Args, Sample
from slime_core.provenance import Source
from slime_core.secrets import hidden_values, learn

_PRIVATE = ("system_prompt", "plugins", "custom_config_path")
"""Settings that trackers are not told: prompts, and what plugins are given."""


class Tracked(NamedTuple):
    """The run that a tracker is opened for."""

    args: Args
    run_dir: Path
    options: Any
    """`slime_hook_trackers.Options`."""
    began: float
    """Seconds since 1970."""


class Text(NamedTuple):
    """A sample to read."""

    prompt: str
    response: str
    reward: str


class Turn(NamedTuple):
    """A piece of a response."""

    tool: bool
    """A tool's answer; otherwise the model's."""
    tokens: int


@dataclass(frozen=True)
class Traced:
    """A sample without its text."""

    index: int | None
    group_index: int | None
    status: str
    reward: float | None
    prompt_tokens: int
    turns: tuple[Turn, ...]
    weight_versions: tuple[str, ...]
    text: Text | None


@dataclass(frozen=True)
class Rollout:
    """Of one rollout."""

    step: int
    """Finished rollouts, this one included."""
    distributions: Mapping[str, Sequence[float]]
    samples: Sequence[Traced]

    @property
    def texts(self) -> list[Text]:
        """Of the samples that have one."""
        return [sample.text for sample in self.samples if sample.text is not None]


def of_rollout(args: Args, rollout_id: int, samples: Sequence[Sample], texts: int) -> Rollout:
    """Copies, for another thread; `texts`: how many samples keep their texts."""
    known = [traced(sample, sample.finite_reward(args), with_text=i < texts) for i, sample in enumerate(samples)]
    return Rollout(
        rollout_id + 1,
        {
            "rollout/rewards": [t.reward for t in known if t.reward is not None],
            "rollout/response_lengths": [float(s.response_length) for s in samples],
        },
        known,
    )


def traced(sample: Sample, reward: float | None, *, with_text: bool = False) -> Traced:
    """What trackers are told of one sample."""
    spans = [s for s in sample.known_spans() if s.source in (Source.SAMPLED, Source.TOOL, Source.TEXT)]
    text = Text(str(sample.prompt), sample.response, str(sample.reward)) if with_text else None
    return Traced(
        sample.index,
        sample.group_index,
        sample.status.value,
        reward,
        len(sample.prompt_tokens),
        tuple(Turn(s.source == Source.TOOL, s.length) for s in spans),
        tuple(sample.weight_versions),
        text,
    )


def settings_of(args: Args) -> dict[str, Any]:
    """Numbers, switches and words of the settings, without secrets, addresses and prompts."""
    found = {}
    for name, value in vars(args).items():
        plain = isinstance(value, (bool, int, float)) or (isinstance(value, str) and "://" not in value)
        if plain and not name.startswith("_") and name not in _PRIVATE:
            learn(name, value)  # a program that made its settings itself has told of none
            found[name] = hidden_values(value)
    return found


def histogram(values: Sequence[float], buckets: int) -> tuple[Any, Any]:
    """Return counts and edges of equal buckets; numbers that are equal but for rounding get buckets a little wider.

    `numpy.histogram` raises ValueError where the edges of two buckets are the same float.
    """
    import numpy

    low, high = min(values), max(values)
    least = max(1e-9 * max(abs(low), abs(high)), 1e-300)
    wide = (low - least, high + least) if 0 < high - low < least else None
    return numpy.histogram(values, bins=buckets, range=wide)
