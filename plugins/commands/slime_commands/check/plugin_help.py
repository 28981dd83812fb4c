"""The end of `slime train --help`: options of the plugins that the other flags and files on the command line select.

Other plugins are not imported, so help stays fast and an installed but broken plugin cannot break it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime_core.errors import SlimeError
from slime_core.text import table

if TYPE_CHECKING:
    from slime_core.config import Settings


def print_options(argv: Sequence[str]) -> None:
    """Print a table per selected component that declares options, and the reason if a component cannot be loaded."""
    rest = [word for word in argv if word != "-h" and not re.match(r"--help(-|$)", word)]
    print("\nPlugin options:")
    lines = [line for rows in _tables(rest) for line in (table(rows) if isinstance(rows, list) else [rows])]
    hint = "name a component (--rm-type math) to see its options here; `slime plugins show rewards/math`"
    for line in lines or [hint]:
        print(f"  {line}")


def _tables(argv: Sequence[str]) -> Iterator[list[tuple[str, ...]] | str]:
    from slime_core.config import load_settings
    from slime_core.plugins.options import option_name, option_rows, options_model
    from slime_core.plugins.resolve import resolve

    try:
        named = list(named_components(load_settings(argv, command="show")))
    except SlimeError as error:
        yield f"not known: {error}"
        return
    for kind, spec, flag in named:
        if spec == "auto":
            continue
        try:
            found = resolve(kind, spec, origin=flag)
        except SlimeError as error:
            yield f"not known: {error}"
            continue
        model, key = options_model(found.obj), option_name(found.ref)
        for row in option_rows(model) if model is not None else ():
            default = f"(default: {row.default})" if row.default else "(must be given)"
            yield [(f"--set plugins.{key}.{row.name}={row.type.upper()}", f"{row.help} {default}".strip())]


def named_components(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, spec, flag) for every component that a file, the environment or a flag names."""
    from slime_core.config.spec import flag_specs
    from slime_core.plugins.discovery import search_as
    from slime_core.plugins.kinds import flag_rows

    search_as(settings.args)
    for kind in flag_rows():
        for flag in kind.flags:
            name = flag.removeprefix("--").replace("-", "_")
            if name not in flag_specs() or not settings.is_given(name):
                continue
            named = getattr(settings.args, name)
            yield from ((kind.name, spec, flag) for spec in ([named] if isinstance(named, str) else named or []))
