"""Every error slime raises on purpose: one class per boundary at which a caller may want to catch errors.

Each class also inherits the built-in exception it refines, so code that does not import slime can catch it. A message
names the value, its origin, the allowed values and the text to type.

To add a class, subclass `SlimeError` plus the closest built-in, and pass only plain strings to `__init__` so that the
error can be pickled between processes.
"""

from __future__ import annotations

from collections.abc import Iterable

_SYNONYMS = {
    "callback": ("hook",), "callbacks": ("hooks",), "evaluate": ("eval",), "gpu": ("cuda",), "info": ("show",),
    "inspect": ("show",), "list": ("runs",), "log": ("show",), "logger": ("hook",), "loggers": ("hooks",),
    "merge": ("export",), "metrics": ("show",), "new": ("init",), "nvidia": ("cuda",), "start": ("train",),
    "status": ("show",), "tracker": ("hook",), "trackers": ("hooks",),
}  # fmt: skip
"""Word that users type -> slime's names for it, where a match by spelling would suggest something else."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.7, form: str = "{}", most: int = 1) -> str:
    """Return " Did you mean x?" with a leading space, or an empty string when nothing is close.

    Args:
        word: The word that was written; case, and - versus _, are ignored.
        known: The valid words.
        cutoff: Similarity required, up to 1; use a lower one for few valid words.
        form: Format of each suggestion, as for `str.format`.
        most: Largest number of suggestions.
    """
    import difflib

    spelled = {name.lower().replace("-", "_"): name for name in known}
    written = word.lower().replace("-", "_")
    close = [name for name in _SYNONYMS.get(written, ()) if name in spelled]
    close = close or difflib.get_close_matches(written, spelled, n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(form.format(spelled[name]) for name in close)}?" if close else ""


def name_of(component: object) -> str:
    """Return the name of a class or function, or of an object's class, for messages."""
    return str(getattr(component, "__name__", type(component).__name__))


def rollout_number(rollout_id: int) -> int:
    """Return the number of a rollout for people, who count from 1; ids, file names and stored fields count from 0."""
    return rollout_id + 1


def rollout_name(rollout_id: int) -> str:
    """Return the name of a rollout for messages."""
    return f"rollout {rollout_number(rollout_id)}"


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
    """The object does not accept the arguments that its kind is called with."""


class PluginIncompatibleError(PluginError, RuntimeError):
    """The plugin is written for another version of its kind's API."""


class EnvironmentTimeoutError(PluginError, TimeoutError):
    """An environment did not respond within its deadline; it must not be used again."""


class RolloutError(SlimeError, RuntimeError):
    """The rollout as a whole cannot continue (a single bad sample is data, not an error)."""


class RolloutInterrupted(SlimeError, RuntimeError):
    """The run is stopping, so this rollout was not finished; its groups were returned to the data source."""

    def __init__(self, drew: bool = True) -> None:
        super().__init__(drew)
        self.drew = drew
        """False if the rollout had not begun: nothing has changed since the previous step."""


class EngineError(SlimeError, RuntimeError):
    """A rollout engine refused a request or stopped responding."""

    status: int | None = None
    """HTTP status of the refusal; None without a response."""
    url: str | None = None
    """URL of the request; None if it was not sent over HTTP."""
    reached: bool = True
    """False if no connection was made, so nothing was executed."""


class WeightSyncError(SlimeError, RuntimeError):
    """The engine's weights differ from the trainer's."""


class CheckpointError(SlimeError, RuntimeError):
    """A checkpoint is torn, foreign, or does not fit this run."""


class RecordError(SlimeError, OSError):
    """A record of the run other than a checkpoint cannot be written: no space, no permission, no directory."""


class TrainError(SlimeError, RuntimeError):
    """The optimizer step cannot be taken."""
