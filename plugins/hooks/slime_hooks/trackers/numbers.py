"""Data for trackers besides metrics: distributions and texts of a rollout, and the settings of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slime_core import Args, Sample
from slime_core.sample.provenance import Source
from slime_core.secrets import hidden_values, learn

_PRIVATE = ("system_prompt", "plugins", "custom_config_path")
"""Settings that are not sent to trackers: prompts, and plugin options."""


class Tracked(NamedTuple):
    """The run for which a tracker is opened."""

    args: Args
    run_dir: Path
    options: Any
    """`slime_hooks.trackers.Options`."""
    began: float
    """Start of the run, in seconds since 1970."""


class Text(NamedTuple):
    """The texts of a sample."""

    prompt: str
    response: str
    reward: str


class Turn(NamedTuple):
    """A piece of a response."""

    tool: bool
    """True for a tool's answer, False for the model's text."""
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
    """Tracker data of one rollout."""

    step: int
    """Number of finished rollouts, including this one."""
    distributions: Mapping[str, Sequence[float]]
    samples: Sequence[Traced]

    @property
    def texts(self) -> list[Text]:
        """Return the texts of the samples that have a text."""
        return [sample.text for sample in self.samples if sample.text is not None]


def of_rollout(args: Args, rollout_id: int, samples: Sequence[Sample], texts: int) -> Rollout:
    """Copy a rollout's data for another thread; the first `texts` samples keep their texts."""
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
    """Return the tracker data of one sample."""
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
    """Return the numbers, switches and strings of the settings, without secrets, addresses and prompts."""
    found = {}
    for name, value in vars(args).items():
        plain = isinstance(value, (bool, int, float)) or (isinstance(value, str) and "://" not in value)
        if plain and not name.startswith("_") and name not in _PRIVATE:
            learn(name, value)  # a program that builds its own settings has recorded none
            found[name] = hidden_values(value)
    return found


def histogram(values: Sequence[float], buckets: int) -> tuple[Any, Any]:
    """Return counts and edges of equal buckets; numbers that differ only by rounding get slightly wider buckets.

    `numpy.histogram` raises ValueError if the edges of two buckets are the same float.
    """
    import numpy

    low, high = min(values), max(values)
    least = max(1e-9 * max(abs(low), abs(high)), 1e-300)
    wide = (low - least, high + least) if 0 < high - low < least else None
    return numpy.histogram(values, bins=buckets, range=wide)
