"""Plugins on a package index, and pip of this interpreter: `slime plugins search`, `install` and `uninstall`.

No index has a search, so plugins are found by the start of their names, `slime-`, and by the keyword `slime-plugin` in
their metadata. An index is read by the simple API (PEP 503 and 691); metadata is the file beside a wheel (PEP 658), or
in the wheel where an index has no such file.
"""

from __future__ import annotations

import ast
import gzip
import io
import json
import platform
import ssl
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import (
    HTTPBasicAuthHandler,
    HTTPPasswordMgrWithPriorAuth,
    HTTPSHandler,
    OpenerDirector,
    Request,
    build_opener,
)

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from slime_core.distributions import GROUP_PREFIX, installed, is_own, normalized
from slime_core.errors import ConfigError, PluginError, PluginNotFoundError
from slime_core.plugins.kinds import HOOK_GROUP
from slime_core.secrets import learn

PREFIX, KEYWORD = "slime-", "slime-plugin"
PYPI = "https://pypi.org/simple"
PIP_S = 600.0
"""Deadline in seconds of a call of pip."""
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_LARGEST = 256 << 20
"""Bytes of the largest answer; PyPI's list of names has about 40 MB."""
_TOLD = 1_000_000
"""Bytes of a list from which the user is told before it is read."""
_ERROR = "ERROR: "


@dataclass(frozen=True)
class Release:
    """The newest release of a project that this Python can use, as its wheel's metadata describes it."""

    name: str
    version: str
    summary: str
    keywords: tuple[str, ...]
    requires: tuple[str, ...]


@dataclass(frozen=True)
class _Wheel:
    """A wheel that a project's page lists."""

    version: Version
    url: str
    has_metadata: bool


class PackageIndex:
    """A package index by its address; `deadline_s` is for all requests together."""

    def __init__(self, url: str, deadline_s: float, cafile: str | None = None) -> None:
        learn("index_url", url)
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "file"):
            raise ConfigError(f"--index-url {url}: no address of an index, such as {PYPI}")
        host = parts.netloc.rpartition("@")[2]
        self.url = parts._replace(netloc=host).geturl().rstrip("/") + "/"
        self._deadline_s = deadline_s
        self._ends = time.monotonic() + deadline_s
        self._opener = _opener(self.url, parts.username, parts.password, cafile)

    def names(self, tell: Callable[[str], None]) -> list[str]:
        """Return the normalized names of all projects that may be plugins of slime.

        Args:
            tell: Gets a text before a list of more than a megabyte, or of unknown size, is read.
        """
        found = {normalized(name.strip("/ \n")) for name in _names(*self._get(self.url, tell))}
        return sorted(name for name in found if name.startswith(PREFIX))

    def newest(self, project: str) -> Release | None:
        """Return the newest release with a wheel for this Python. Raises PluginNotFoundError without such a project."""
        wheels = list(_wheels(*self._get(urljoin(self.url, f"{normalized(project)}/"))))
        chosen = max(wheels, key=lambda wheel: (not wheel.version.is_prerelease, wheel.version), default=None)
        if chosen is None:
            return None
        if chosen.has_metadata:
            return _release(self._get(f"{chosen.url}.metadata")[0])
        return release_of_wheel(self._get(chosen.url)[0], chosen.url)

    def _get(self, url: str, tell: Callable[[str], None] | None = None) -> tuple[bytes, str, str]:
        """Return the body, its type and its address after redirects."""
        if url.startswith("file:") and url.endswith("/"):
            url += "index.html"
        request = Request(url, headers={"Accept": _ACCEPT, "Accept-Encoding": "gzip", "User-Agent": "slime"})
        body = bytearray()
        try:
            with self._opener.open(request, timeout=self._remaining(url)) as answer:
                size = int(answer.headers.get("Content-Length") or _LARGEST)
                if tell is not None and size > _TOLD:
                    shown = f"{size / 1e6:.0f} MB" if size < _LARGEST else "of unknown size; PyPI's has about 40 MB"
                    tell(f"reading the list of all projects of {self.url} ({shown}), at most {self._deadline_s:g} s")
                while piece := answer.read(1 << 16):
                    body += piece
                    self._remaining(url)
                    if len(body) > _LARGEST:
                        raise PluginError(f"{url} has more than {_LARGEST >> 20} MB, which is no page of an index")
                headers = answer.headers
                whole = gzip.decompress(body) if headers.get("Content-Encoding") == "gzip" else bytes(body)
                return whole, headers.get_content_type(), str(answer.url)
        except HTTPError as error:
            if error.code == 404:
                raise PluginNotFoundError(f"{self.url} has no {url.removeprefix(self.url).strip('/')}") from None
            raise PluginError(f"{url} answers {error.code} {error.reason}") from None
        except OSError as error:  # TimeoutError is one
            raise self._unreachable(str(error.reason if isinstance(error, URLError) else error)) from None

    def _remaining(self, url: str) -> float:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise self._unreachable(f"no whole answer within {self._deadline_s:g} s, at {url}")
        return left

    def _unreachable(self, reason: str) -> PluginError:
        return PluginError(
            f"cannot read the package index {self.url}: {reason}. Without a network install a wheel:"
            " slime plugins install ./NAME.whl; another index: --index-url URL"
        )


def _opener(url: str, user: str | None, password: str | None, cafile: str | None) -> OpenerDirector:
    """Return an opener that gives the password to the index's host only."""
    passwords = HTTPPasswordMgrWithPriorAuth()
    if user:
        passwords.add_password(None, urljoin(url, "/"), unquote(user), unquote(password or ""), is_authenticated=True)
    context = ssl.create_default_context(cafile=cafile)
    return build_opener(HTTPBasicAuthHandler(passwords), HTTPSHandler(context=context))


def _release(text: bytes) -> Release:
    """Return the release that core metadata describes."""
    facts, _ = parse_email(text)
    return Release(
        normalized(facts.get("name", "")),
        facts.get("version", ""),
        facts.get("summary", ""),
        tuple(word.strip() for word in facts.get("keywords", ())),
        tuple(facts.get("requires_dist", ())),
    )


class _Links(HTMLParser):
    """The links of a page of PEP 503, each with its attributes and its text."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self._open = False
        self.feed(page.decode("utf-8", "replace"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a link."""
        if tag == "a":
            self.found.append((dict(attrs), ""))
        self._open = tag == "a"

    def handle_data(self, data: str) -> None:
        """Add to the text of the open link."""
        if self._open and self.found:
            attributes, text = self.found[-1]
            self.found[-1] = attributes, text + data

    def handle_endtag(self, tag: str) -> None:
        """End a link."""
        self._open = False


def _names(body: bytes, kind: str, address: str) -> list[str]:
    if kind.endswith("json"):
        return [str(project.get("name", "")) for project in _json(body, address).get("projects", ())]
    return [text for _, text in _Links(body).found]


def _wheels(body: bytes, kind: str, address: str) -> Iterator[_Wheel]:
    """Yield the wheels that are not yanked and that this Python may use."""
    if kind.endswith("json"):
        files: Iterable[Mapping[str, Any]] = _json(body, address).get("files", ())
    else:
        files = [{name.removeprefix("data-"): text for name, text in found.items()} for found, _ in _Links(body).found]
    for file in files:
        url = urldefrag(urljoin(address, str(file.get("url") or file.get("href") or "")))[0]
        try:
            _, version, _, _ = parse_wheel_filename(unquote(url.rpartition("/")[2]))
            usable = SpecifierSet(str(file.get("requires-python") or "")).contains(platform.python_version())
        except (InvalidWheelFilename, InvalidSpecifier):
            continue
        if usable and file.get("yanked", False) is False:
            offered = file.get("core-metadata") or file.get("dist-info-metadata")
            yield _Wheel(version, url, bool(offered) and offered != "false")


def _json(body: bytes, address: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PluginError(f"{address} is no page of a package index: its JSON cannot be read")
    return found


def release_of_wheel(wheel: bytes, origin: str) -> Release:
    """Return the release that a wheel is. Raises PluginError for another file."""
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            return _release(archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))))
    except (zipfile.BadZipFile, StopIteration):
        raise PluginError(f"{origin} is no wheel") from None


def unmet(release: Release) -> str | None:
    """Return the first requirement on a distribution of slime's own that the installed version does not meet."""
    for text in release.requires:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        own = installed(wanted.name) if is_own(wanted.name) else None
        if own is not None and not wanted.specifier.contains(own.version, prereleases=True):
            return f"{text}, and {own.version} is installed"
    return None


def offers(entries: Iterable[metadata.EntryPoint]) -> list[str]:
    """Return `KIND/NAME` of the entry points that slime reads, sorted."""
    own = [entry for entry in entries if entry.group.startswith(GROUP_PREFIX)]
    kinds = {HOOK_GROUP: "hooks"}
    return sorted(f"{kinds.get(e.group, e.group.removeprefix(GROUP_PREFIX))}/{e.name}" for e in own)


def offers_of_wheel(wheel: Path) -> list[str]:
    """Return `KIND/NAME` of the plugins in a wheel."""
    parser = ConfigParser(delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their case
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".dist-info/entry_points.txt"):
                parser.read_string(archive.read(name).decode("utf-8"))
    return offers(
        metadata.EntryPoint(name, target, group) for group in parser.sections() for name, target in parser.items(group)
    )


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip of this interpreter. Raises PluginError if there is none or it does not end."""
    if find_spec("pip") is None:
        raise PluginError(
            f"{sys.executable} has no pip; type: {sys.executable} -m ensurepip, or install by the tool that made this"
            " environment"
        )
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PIP_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise PluginError(f"pip {arguments[0]} did not end within {PIP_S:g} s") from None


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    """Return the first error of pip with the requirements that clash, or its last line."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    return " ".join([*(errors or lines[-1:])[:1], *(line for line in lines if " depends on " in line)]) or "no output"


def index(given: str | None, deadline_s: float) -> PackageIndex:
    """Return the index that the user named, or the one that pip's settings name."""
    settings: dict[str, str] = {}
    for line in pip("config", "list").stdout.splitlines():
        name, _, value = line.partition("=")
        settings[name] = str(ast.literal_eval(value or "''"))
    asked = (":env:", "install", "global")

    def setting(name: str) -> str | None:
        return next((settings[key] for place in asked if (key := f"{place}.{name}") in settings), None)

    return PackageIndex(given or setting("index-url") or PYPI, deadline_s, setting("cert"))
