"""Options of the multi-agent generator: the roles, their prompts and their order.

They are set in `plugins.multi_agent`, or in `multi_agent` of the file of `--custom-config-path`, which takes precedence
for each name.
"""

from __future__ import annotations

import string
from typing import Annotated

from pydantic import Field, model_validator

from slime_core import Args, PluginOptions, options
from slime_core.errors import ConfigError

QUESTION = "question"


class Role(PluginOptions):
    """A role of the conversation."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Name of the role, used in prompts and in `order`."""
    prompt: str | None = None
    """First message to the role; {question} and {ROLE} (the newest answer of a role) are filled in. Default: the row's
    prompt, unchanged."""
    again: str | None = None
    """Message before each later turn, filled in the same way; required for a role with several turns."""
    system: str | None = None
    """System message of the role; only with `prompt`."""
    trainable: bool = True
    """Train on the answers of the role."""
    adapter: str | None = None
    """Name of `--lora-adapters`, with which the role answers and which its answers train. Default: the role's own name
    if `--lora-adapters` has it, else the shared adapter; without LoRA, the model."""
    max_new_tokens: Annotated[int | None, Field(gt=0)] = None
    """Maximum tokens of a turn; by default the remaining tokens of the response."""


_SOLVER = Role(name="solver", again="A critic says:\n{critic}\n\nAnswer again.")
_CRITIC = Role(
    name="critic",
    prompt="{question}\n\nSomebody answers:\n{solver}\n\nSay what is wrong with the answer, if anything is.",
    again="The new answer:\n{solver}\n\nSay what is wrong with it, if anything is.",
)


class Options(PluginOptions):
    """Options of the generator `multi_agent`."""

    roles: list[Role] = Field(default_factory=lambda: [_SOLVER, _CRITIC])
    """Roles; the prompt's sample becomes the sample of the first role."""
    order: list[str] = Field(default_factory=lambda: ["solver", "critic", "solver"])
    """Roles in the order of their turns; the last role's answer is the final answer."""
    rounds: Annotated[int, Field(gt=0)] = 1
    """Number of times that `order` without its first entry is repeated."""
    reward_path: str | None = None
    """Function fn(args, samples, reward), plain or async, that returns the rewards by role name. `samples`: role name
    -> sample; `reward`: the final answer's reward (None without a reward function). Default: all roles get `reward`."""

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
        """Return the role name of each turn."""
        return [*self.order, *self.order[1:] * (self.rounds - 1)]

    def role(self, name: str) -> Role:
        """Return the role with this name."""
        return next(role for role in self.roles if role.name == name)


def _check_fields(role: Role, names: list[str]) -> None:
    for text in (role.prompt, role.again, role.system):
        used = {field for _, field, _, _ in string.Formatter().parse(text or "") if field is not None}
        if used - {QUESTION, *names}:
            known = ", ".join(f"{{{name}}}" for name in (QUESTION, *names))
            raise ValueError(f"role {role.name!r}: {text!r} has {sorted(used - {QUESTION, *names})}; known: {known}")


def adapter_of(args: Args, role: Role) -> str | None:
    """Return the name of the role's adapter; None for the shared one."""
    return role.adapter or (role.name if role.name in args.lora_adapters else None)


def check(args: Args, *, training: bool) -> None:
    """Raise ConfigError for a role whose adapter the run does not have, and for an adapter that trains with no role."""
    roles, known = options_of(args).roles, args.lora_adapters
    for role in roles:
        if role.adapter is not None and role.adapter not in known:
            has = " ".join(known) or "no names; type --lora-rank N --lora-adapters NAME ..."
            raise ConfigError(f"multi_agent: role {role.name!r}: adapter {role.adapter!r}; --lora-adapters has {has}")
    idle = sorted(set(known) - {adapter_of(args, role) for role in roles})
    if idle and training:
        raise ConfigError(
            f"--lora-adapters {' '.join(idle)}: no role of multi_agent has this name or `adapter`;"
            f" roles: {', '.join(role.name for role in roles)}"
        )


def options_of(args: Args) -> Options:
    """Return the run's options. Raises ConfigError, or ValueError for options of `--custom-config-path`."""
    chosen = options(args, "multi_agent", Options)
    custom = getattr(args, "multi_agent", None)
    return chosen if not custom else Options.model_validate({**chosen.model_dump(), **custom})
