"""Who speaks, in which order, and what each is told.

Given as `plugins.multi_agent`, or as `multi_agent` in the file of `--custom-config-path`, which wins name by name.
"""

from __future__ import annotations

import string
from typing import Annotated

from pydantic import Field, model_validator

from slime_core import Args, PluginOptions, options

QUESTION = "question"


class Role(PluginOptions):
    """One role."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """What others refer to it by."""
    prompt: str | None = None
    """Its first message; {question} and {ROLE}, a role's newest answer, are filled in. The row's prompt as it is when
    not given."""
    again: str | None = None
    """The message before each later turn, filled in alike; required of a role that speaks more than once."""
    system: str | None = None
    """Its system message; only with `prompt`."""
    trainable: bool = True
    """Train on what it says."""
    max_new_tokens: Annotated[int | None, Field(gt=0)] = None
    """Longest turn; what is left of the response by default."""


_SOLVER = Role(name="solver", again="A critic says:\n{critic}\n\nAnswer again.")
_CRITIC = Role(
    name="critic",
    prompt="{question}\n\nSomebody answers:\n{solver}\n\nSay what is wrong with the answer, if anything is.",
    again="The new answer:\n{solver}\n\nSay what is wrong with it, if anything is.",
)


class Options(PluginOptions):
    """Options of the generator `multi_agent`."""

    roles: list[Role] = Field(default_factory=lambda: [_SOLVER, _CRITIC])
    """The first is the one whose sample the prompt's becomes."""
    order: list[str] = Field(default_factory=lambda: ["solver", "critic", "solver"])
    """Who speaks, in turn; the last one's answer is what counts."""
    rounds: Annotated[int, Field(gt=0)] = 1
    """How often everything of `order` but its first entry is repeated."""
    reward_path: str | None = None
    """fn(args, samples, reward), plain or async: the role's sample by name, and the last answer's reward (None without
    a reward function); returns the roles' rewards by name. All get the last answer's when not given."""

    @model_validator(mode="after")
    def _fits(self) -> Options:
        names = [role.name for role in self.roles]
        if len(set(names)) != len(names) or not names or QUESTION in names:
            raise ValueError(f"roles {names}: give at least one, each a name of its own other than {QUESTION!r}")
        turns = self.turns()
        if not turns or not set(turns) <= set(names):
            raise ValueError(f"order {self.order}: name roles of {names}")
        if turns[0] != names[0] or set(turns) != set(names):
            raise ValueError(f"order {self.order}: begin with {names[0]!r}, and have all of {names}")
        for role in self.roles:
            if turns.count(role.name) > 1 and role.again is None:
                raise ValueError(f"role {role.name!r} speaks more than once and needs `again`")
            if role.system is not None and role.prompt is None:
                raise ValueError(f"role {role.name!r}: `system` goes with `prompt`; the row's own prompt has its own")
            _check_fields(role, names)
        return self

    def turns(self) -> list[str]:
        """The role of each turn."""
        return [*self.order, *self.order[1:] * (self.rounds - 1)]

    def role(self, name: str) -> Role:
        """The role of that name."""
        return next(role for role in self.roles if role.name == name)


def _check_fields(role: Role, names: list[str]) -> None:
    for text in (role.prompt, role.again, role.system):
        used = {field for _, field, _, _ in string.Formatter().parse(text or "") if field is not None}
        if used - {QUESTION, *names}:
            known = ", ".join(f"{{{name}}}" for name in (QUESTION, *names))
            raise ValueError(f"role {role.name!r}: {text!r} has {sorted(used - {QUESTION, *names})}; known: {known}")


def options_of(args: Args) -> Options:
    """The run's. Raises ConfigError, or ValueError for those of `--custom-config-path`."""
    chosen = options(args, "multi_agent", Options)
    custom = getattr(args, "multi_agent", None)
    return chosen if not custom else Options.model_validate({**chosen.model_dump(), **custom})
