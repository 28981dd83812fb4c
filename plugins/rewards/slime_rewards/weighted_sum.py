"""The weighted sum of other rewards, each named by a spec as for `--custom-rm-path`.

Every term is resolved and checked when the run starts. The reward is the sum, and `sample.reward_components` are the
terms before their weights; with `--reward-key score` the reward is the mapping `{"score": sum, <term>: value, ...}`.

A term that returns None does not apply to the sample and is left out of its sum. A sample to which no term applies
fails.

Terms run concurrently. If a term fails, the sample fails, with the term's name. If any term is plain (not async), the
whole sum runs in a worker process, where a hanging term is killed. With async terms only (HTTP services) it runs on the
event loop.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field

from slime_core import Args, PluginOptions, RewardCaller, RewardTraits, Sample, options, resolve
from slime_core.errors import ConfigError, PluginError


class Term(BaseModel):
    """A reward in the sum, with its weight."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    reward: str
    """Reward as name, pkg.mod:attr or file.py:attr, like the value of --custom-rm-path."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of the reward in the sum."""
    key: str | None = None
    """Entry that counts if the reward is a mapping."""
    name: str | None = None
    """Key of the term in the mapping; by default the reward's spec."""


class Options(PluginOptions):
    """`plugins: {weighted_sum: {...}}`."""

    terms: list[Term] = Field(min_length=1)
    """List of {reward: SPEC, weight: 1.0, key: null, name: null}."""


class WeightedSum:
    """A weighted sum of rewards, which are resolved when the run starts."""

    Options = Options

    def __init__(self, args: Args) -> None:
        self.terms = options(args, "weighted_sum", Options).terms
        self.names = [term.name or term.reward for term in self.terms]
        taken = [n for n in self.names if self.names.count(n) > 1 or n == "score"]
        if taken:
            raise ConfigError(f"plugins.weighted_sum.terms: {taken[0]!r} is taken; give each term a name of its own")
        self.members = [self._resolved(i, term) for i, term in enumerate(self.terms)]
        """Resolved rewards, for the run's provenance."""
        self.callers = [
            RewardCaller(member, cast("Args", _TermArgs(args, term.key)), skips_none=True)
            for member, term in zip(self.members, self.terms)
        ]
        self.traits = RewardTraits(
            execution="process" if any(caller.execution == "thread" for caller in self.callers) else None,
            scores_groups=any(caller.scores_groups for caller in self.callers),
        )

    async def __call__(self, args: Args, samples: list[Sample], evaluation: bool = False) -> list[Any]:
        """Return a sum, or a mapping, per sample.

        Raises:
            PluginError: A term failed, or returned a mapping although it has no `key`; the message names the term. Or
                all terms returned None.
            ValueError: A term cannot read the label.
        """
        columns = await asyncio.gather(*(self._column(i, samples, evaluation) for i in range(len(self.terms))))
        rows = [{name: value for name, value in zip(self.names, row) if not math.isnan(value)} for row in zip(*columns)]
        for sample, row in zip(samples, rows):
            if not row:
                raise PluginError(f"sample {sample.index}: every term returned None, so no reward applies to it")
            sample.reward_components = {**(sample.reward_components or {}), **row}
        weights = {name: term.weight for name, term in zip(self.names, self.terms)}
        totals = [sum(weights[name] * value for name, value in row.items()) for row in rows]
        if not self._read_as_mapping(args, evaluation):
            return totals
        return [{"score": total, **row} for total, row in zip(totals, rows)]

    def _resolved(self, index: int, term: Term) -> Any:
        origin = f"plugins.weighted_sum.terms[{index}].reward"
        member = resolve("rewards", term.reward, origin=origin)
        if member.obj is WeightedSum:
            raise ConfigError(f"{origin} {term.reward!r}: a sum cannot be a term of itself")
        return member

    async def _column(self, index: int, samples: list[Sample], evaluation: bool) -> list[float]:
        """Return the values of one term."""
        term, caller = self.terms[index], self.callers[index]
        try:
            values: list[Any]
            if caller.batched:
                values = list(await caller.score(samples, evaluation))
            else:
                parts = await asyncio.gather(*(caller.score([sample], evaluation) for sample in samples))
                values = [value for part in parts for value in part]
        except ValueError as error:
            raise ValueError(f"term {self.names[index]!r}: {error}") from error
        except Exception as error:
            hint = "" if term.key else " (a term that is a mapping needs `key`)" if "mapping" in str(error) else ""
            raise PluginError(f"term {self.names[index]!r}: {type(error).__name__}: {error}{hint}") from error
        numbers = [value[term.key] if isinstance(value, dict) else value for value in values]
        return [math.nan if number is None else float(number) for number in numbers]

    @staticmethod
    def _read_as_mapping(args: Args, evaluation: bool) -> bool:
        key = args.eval_reward_key if evaluation else args.reward_key
        return bool(key or args.custom_reward_post_process_path)


class _TermArgs:
    """The run's settings for one term: the term's own `reward_key`, and no other reader of mappings."""

    custom_reward_post_process_path = None

    def __init__(self, args: Args, key: str | None) -> None:
        self._args = args
        self.reward_key = self.eval_reward_key = key
        # Less than the sum's timeout, so that an error names the term and not the sum.
        self.rm_timeout = None if args.rm_timeout is None else 0.95 * args.rm_timeout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_args"], name)
