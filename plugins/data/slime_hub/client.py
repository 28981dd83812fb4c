"""The hub's client: which commit a name means, and one line for everything that can go wrong on the way.

Endpoint, cache, token and offline mode come from the environment alone (`HF_ENDPOINT`, `HF_HOME` or `HF_HUB_CACHE`,
`HF_TOKEN`, `HF_HUB_OFFLINE`), and are read at each call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from slime_core.distributions import BUNDLE
from slime_core.errors import ConfigError
from slime_hub.names import HubName

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

Kind = Literal["model", "dataset"]
_ANSWER_S = 20.0
"""Seconds to wait for the answer about a repository."""
_TRUE = ("1", "on", "yes", "true")


def token() -> str | Literal[False]:
    """Return the token of the environment; False makes the client send none."""
    return os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or False


def is_offline() -> bool:
    """Return True if the environment forbids requests to the hub."""
    return any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def endpoint() -> str:
    """Return the hub's address."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def client() -> HfApi:
    """Return the client. Raises ConfigError without the library."""
    from slime_core import __version__

    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError(f"names of the hub need huggingface_hub: pip install '{BUNDLE}[hub]'") from error
    return HfApi(endpoint=endpoint(), token=token(), library_name="slime", library_version=__version__)


def page(name: HubName, kind: Kind) -> str:
    """Return the address of the repository's page."""
    return f"{endpoint()}/{'datasets/' if kind == 'dataset' else ''}{name.repo}"


def commit_of(name: HubName, kind: Kind, cited: str) -> str:
    """Return the commit that a name means: a commit itself, else what the hub answers, else what the cache last had.

    Args:
        name: Name in a setting.
        kind: Kind of the repository.
        cited: The setting, for messages.

    Raises:
        ConfigError: No such repository or revision, no access, or neither the hub nor the cache can answer.
    """
    if name.is_commit:
        return str(name.revision)
    if is_offline():
        cached = cached_commit(name, kind)
        if cached is None:
            raise not_cached(name, kind, cited)
        return cached
    try:
        with translated(name, kind, cited):
            info = client().repo_info(name.repo, repo_type=kind, revision=name.revision or "main", timeout=_ANSWER_S)
    except Unreachable as error:
        cached = cached_commit(name, kind)
        if cached is None:
            raise
        logger.warning("%s; using commit %s of the cache", error, cached[:8])
        return cached
    assert info.sha is not None, "the answer about a revision has its commit"
    if cached_commit(name, kind) != info.sha:
        ref = _ref(name, kind)
        with suppress(OSError):  # a cache that one may only read
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(info.sha, encoding="utf-8")
    return str(info.sha)


def cached_commit(name: HubName, kind: Kind) -> str | None:
    """Return the commit that the cache has for a branch or tag; None without one."""
    ref = _ref(name, kind)
    return ref.read_text(encoding="utf-8") if ref.is_file() else None


def _ref(name: HubName, kind: Kind) -> Path:
    """Return the cache's file with the commit of a branch or tag, as huggingface_hub places it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = "--".join((f"{kind}s", *name.repo.split("/")))
    return Path(HF_HUB_CACHE, folder, "refs", name.revision or "main")


def not_cached(name: HubName, kind: Kind, cited: str) -> ConfigError:
    """Return the error for a repository that the cache lacks while requests are forbidden."""
    from huggingface_hub.constants import HF_HUB_CACHE

    typed = " ".join(["hf download", *(["--repo-type dataset"] if kind == "dataset" else []), name.repo])
    return ConfigError(
        f"{cited}: no such path here, and not in the cache {HF_HUB_CACHE}; HF_HUB_OFFLINE forbids requests to the hub:"
        f" unset it, or type {typed} where there is a network and copy the cache"
    )


class Unreachable(ConfigError):
    """The hub gave no usable answer, so the cache may be used instead."""


@contextmanager
def translated(name: HubName, kind: Kind, cited: str) -> Iterator[None]:
    """Turn the client's errors into one line: the setting, the cause, and what to type.

    Raises:
        ConfigError: Missing, private or gated repository, missing revision, refused token.
        Unreachable: No connection, a rate limit, a fault of the server, or a download that broke off.
    """
    from huggingface_hub import errors

    # The HTTP library's base class, which differs by version of huggingface_hub, and OSError.
    network = cast("tuple[type[Exception], ...]", errors.HfHubHTTPError.__bases__)
    try:
        yield
    except errors.HFValidationError as error:
        raise ConfigError(f"{cited}: {str(error).splitlines()[0]}") from error
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{cited}: {page(name, kind)} is gated: accept its conditions there, and set HF_TOKEN to a token of that"
            " account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        why = "that HF_TOKEN may read" if token() else "without a token; for a private one set HF_TOKEN"
        raise ConfigError(f"{cited}: no such path here, and no {kind} {name.repo} at {endpoint()} {why}") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{cited}: {name.repo} has no revision {name.revision!r}; {page(name, kind)}/tree/main lists its branches"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise Unreachable(f"{cited}: {endpoint()} cannot be reached, and the cache lacks {name.repo}") from error
    except errors.HfHubHTTPError as error:
        raise _refused(error, cited) from error
    except FileNotFoundError:
        raise
    except network as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Unreachable(
            f"{cited}: the connection to {endpoint()} failed ({first}); what was downloaded is kept, so type the same"
            " command again"
        ) from error


def _refused(error: Any, cited: str) -> ConfigError:
    """Return the error for a status that is not about the repository."""
    status = error.response.status_code
    if status == 401:
        return ConfigError(f"{cited}: {endpoint()} does not accept the token in HF_TOKEN; make one at /settings/tokens")
    if status == 403:
        return ConfigError(f"{cited}: {endpoint()} refuses ({error.server_message}); HF_TOKEN needs the right to this")
    if status == 429:
        after = error.response.headers.get("Retry-After")
        when = f"in {after} s" if after else "later"
        more = "" if token() else "; with HF_TOKEN set the limit is higher"
        return Unreachable(f"{cited}: {endpoint()} limits the rate of requests; type the same command {when}{more}")
    told = error.server_message or "no reason given"
    return Unreachable(f"{cited}: {endpoint()} answered {status} ({told}); type the same command later")
