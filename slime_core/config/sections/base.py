"""What every section of settings is made of: a pydantic base and the annotation that spells a flag.

A section is a class with one attribute per flag; the string under the attribute is the flag's help. `schema.Args`
inherits all sections, so attributes are flat. Wrong guess to avoid: a flag's spelling is derived from the
attribute's name and type; `Flag` is needed only where that is not enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Flag:
    """Spelling of one flag where it differs from `--attribute-name`."""

    off: str | None = None
    """Flag that stores False (THUDM/slime's `--disable-...`), instead of `--no-...`."""
    append: bool = False
    """A list that takes one value each time the flag is repeated."""
    paths: bool = False
    """A list of directories: split at the path separator when it comes from the environment."""
    metavar: str | None = None
    """Name of the value in the help text."""
    name: str | None = None
    """Flag, key and variable instead of the attribute's name, where that name is a word of Python."""
    also: tuple[str, ...] = ()
    """Other flags, without the dashes, for the same setting."""
    holds: Literal["", "path", "pairs", "spec", "marked"] = ""
    """What of the value a run file names relative to itself: the path it is, perhaps with a slice or a placeholder;
    the paths of a list of names and paths; a `.py` file in the place of a component's name, which is so for every
    attribute that ends in `_path`; or texts that begin with `./` and `../`."""


FILE = Flag(holds="path")
"""Of a setting that is the path of a file or a directory."""
SPEC = Flag(holds="spec")
"""Of a component's name without `_path` in the attribute's."""


def _all_or_some(value: int) -> int:
    if value != -1 and value < 1:
        raise PydanticCustomError("top_k", "Input should be -1 (all tokens) or at least 1")
    return value


TopK = Annotated[int, AfterValidator(_all_or_some)]
"""How many of the likeliest tokens to sample from."""


Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What generators of random numbers take."""


class Section(BaseModel):
    """One group of flags. Unknown keyword arguments become attributes."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=(), defer_build=True)
