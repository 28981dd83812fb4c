"""Every error slime raises on purpose, one class per boundary at which a caller may want to catch.

Each class also inherits the built-in exception it refines, so code that knows nothing of slime still
catches it. A message names the value, where it came from, what is allowed and what to type.

Adding one: subclass `SlimeError` plus the closest built-in, and keep `__init__` to plain strings so the
error survives a trip between processes.
"""

from __future__ import annotations

from collections.abc import Iterable

_SYNONYMS = {
    "callback": ("hook",), "callbacks": ("hooks",), "evaluate": ("eval",), "gpu": ("cuda",), "info": ("show",),
    "inspect": ("show",), "list": ("runs",), "log": ("show",), "logger": ("hook",), "loggers": ("hooks",),
    "merge": ("export",), "metrics": ("show",), "new": ("init",), "nvidia": ("cuda",), "start": ("train",),
    "status": ("show",), "tracker": ("hook",), "trackers": ("hooks",),
}  # fmt: skip
"""What people write -> the names for it, where spelling would lead elsewhere."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.7, form: str = "{}", most: int = 1) -> str:
    """ " Did you mean x?" with a space before it, or an empty string when nothing is close.

    Args:
        word: What was written; capitals, and whether parts are joined by - or _, do not count.
        known: What there is.
        cutoff: How close, up to 1; few words to choose from bear a lower one.
        form: How each is written, as for `str.format`.
        most: How many are named.
    """
    import difflib

    spelled = {name.lower().replace("-", "_"): name for name in known}
    written = word.lower().replace("-", "_")
    close = [name for name in _SYNONYMS.get(written, ()) if name in spelled]
    close = close or difflib.get_close_matches(written, spelled, n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(form.format(spelled[name]) for name in close)}?" if close else ""


def name_of(component: object) -> str:
    """How messages call a class, a function or an object: by its name, or its class's."""
    return str(getattr(component, "__name__", type(component).__name__))


class SlimeError(Exception):
    """Base of all errors raised by slime itself."""


class ConfigError(SlimeError, ValueError):
    """A setting is unknown, malformed, or contradicts another; raised before any process starts."""


class DataError(SlimeError, ValueError):
    """A data set file or row cannot be used; the message names file and line."""


class PluginError(SlimeError):
    """A plugin could not be used."""


class PluginNotFoundError(PluginError, LookupError):
    """No plugin of that kind and name is installed, or the path does not lead to an object."""


class PluginConflictError(PluginError, ValueError):
    """Two distributions offer the same name for the same kind."""


class PluginLoadError(PluginError, ImportError):
    """Importing the plugin's module raised."""


class PluginSignatureError(PluginError, TypeError):
    """The object cannot be called the way its kind is called."""


class PluginIncompatibleError(PluginError, RuntimeError):
    """The plugin is written for another version of its kind's API."""


class EnvironmentTimeoutError(PluginError, TimeoutError):
    """An environment did not answer within its deadline; nothing more may be asked of it."""


class RolloutError(SlimeError, RuntimeError):
    """The rollout as a whole cannot go on (a single bad sample is data, not an error)."""


class RolloutInterrupted(SlimeError, RuntimeError):
    """The run is to end, so this rollout was not finished; what it had drawn is back in the data source."""

    def __init__(self, drew: bool = True) -> None:
        super().__init__(drew)
        self.drew = drew
        """False: it had not begun, so nothing has changed since the step before."""


class EngineError(SlimeError, RuntimeError):
    """A rollout engine refused a request or stopped answering."""

    status: int | None = None
    """HTTP status of the refusal, where there was an answer."""
    url: str | None = None
    """What was asked, where it was asked over HTTP."""
    reached: bool = True
    """False: no connection was made, so nothing was executed."""


class WeightSyncError(SlimeError, RuntimeError):
    """The engine's weights are not the trainer's."""


class CheckpointError(SlimeError, RuntimeError):
    """A checkpoint is torn, foreign, or does not fit this run."""


class RecordError(SlimeError, OSError):
    """What a run records beside its checkpoints cannot be written: no space, no permission, no directory."""


class TrainError(SlimeError, RuntimeError):
    """The optimizer step cannot be taken."""
