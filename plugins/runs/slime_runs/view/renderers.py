"""Renderers of plugins (entry points of the group `slime.renderers`), which show an environment's own state as HTML.

A renderer is a function of a `Sample` that returns the body of an HTML document, or None if it has nothing to show. The
HTML is shown in a sandboxed frame, without scripts and without the network.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

from slime_core.distributions import entry_points
from slime_core.errors import SlimeError
from slime_core.sample import Sample

GROUP = "slime.renderers"
Renderer = Callable[[Sample], str | None]


class RendererError(SlimeError):
    """A renderer that cannot be loaded or fails."""


def renderer_names() -> list[str]:
    """Return the names of the installed renderers."""
    return list(_installed())


def render(name: str, sample: Sample) -> str | None:
    """Return the document's body for a sample. Raises RendererError."""
    if name not in (installed := _installed()):
        raise RendererError(f"no renderer {name!r}; installed: {', '.join(installed) or 'none'}")
    entry, distribution = installed[name]
    try:
        renderer: Renderer = entry.load()
        body = renderer(sample)
    except Exception as error:  # the boundary to the plugin
        raise RendererError(f"renderer {name!r} ({distribution}): {type(error).__name__}: {error}") from error
    if body is not None and not isinstance(body, str):
        raise RendererError(f"renderer {name!r} ({distribution}) returned {type(body).__name__}; expected HTML as str")
    return body


def _installed() -> dict[str, tuple[EntryPoint, str]]:
    return dict(sorted((name, (entry, dist)) for name, entry, dist in entry_points(GROUP)))
