"""A server of the Hugging Face hub's HTTP protocol on localhost, for tests with the real `huggingface_hub` client.

It keeps repositories in memory: commits of files, branches, private and gated repositories, uploads of large files.
`Hub.faults` makes requests fail: with 429, with 503, or with a connection that breaks off within the body.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_" + "a" * 34
"""Token of a user who may read every repository, and write."""
LARGE = 1 << 20
"""Files from this size on are uploaded by LFS."""
_REPO = r"(?P<repo>[^/]+(?:/[^/]+)?)"


@dataclass
class Repo:
    """A repository, as commits of whole file trees."""

    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files and return its hash."""
        digest = hashlib.sha1(f"{len(self.commits)} {branch}".encode())
        for name, content in sorted(files.items()):
            digest.update(name.encode() + content)
        self.commits.append((digest.hexdigest(), files))
        self.branches[branch] = digest.hexdigest()
        return digest.hexdigest()

    def find(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a branch, or with this hash."""
        wanted = self.branches.get(revision, revision)
        return next((one for one in self.commits if one[0] == wanted), None)

    @property
    def files(self) -> dict[str, bytes]:
        """The newest files."""
        return self.commits[-1][1]


@dataclass
class Fault:
    """A failure of the next `times` requests whose path matches."""

    path: str
    status: int = 0
    """Status to answer; 0 sends half of the body and closes the connection."""
    times: int = 1 << 30
    headers: dict[str, str] = field(default_factory=dict)


class Hub:
    """The server's content, and the requests that it received."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.large: dict[str, bytes] = {}
        """Uploaded LFS files by SHA-256."""
        self.parts: dict[str, dict[int, bytes]] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.part_bytes = 0
        """Size of a part of an upload; 0 takes files whole."""
        self.url = ""
        self.storage = ""
        """Address of large files: the same server by another name, as the hub has them at another host."""
        self.lock = threading.Lock()

    def add(self, name: str, files: Path | dict[str, bytes], kind: str = "model", **access: bool) -> str:
        """Commit files, or those of a folder, to a repository that is created when it is missing."""
        if isinstance(files, Path):
            paths = [path for path in sorted(files.rglob("*")) if path.is_file()]
            files = {str(path.relative_to(files)): path.read_bytes() for path in paths}
        repo = self.repos.setdefault((kind, name), Repo(**access))
        return repo.commit(files)

    def fail(self, path: str, status: int = 0, times: int = 1 << 30, **headers: str) -> None:
        """Let requests fail."""
        self.faults.append(Fault(path, status, times, {k.replace("_", "-"): v for k, v in headers.items()}))

    def take_fault(self, path: str) -> Fault | None:
        """Return the fault of this request, and count it."""
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and fnmatch(path, fault.path):
                    fault.times -= 1
                    return fault
        return None

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return the variables by which a process reaches this hub, with a cache of its own."""
        access = {} if token is None else {"HF_TOKEN": token}
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            **access,
        }


class _Handler(BaseHTTPRequestHandler):
    """Answers one request; `_ROUTES` says which method does."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        self.body = self._read_body()
        parts = urlsplit(self.path)
        path, self.query = unquote(parts.path), parse_qs(parts.query)
        self.hub.requests.append(f"{method} {path}")
        self.hub.bodies.append(self.body)
        self.fault = self.hub.take_fault(path)
        if self.fault is not None and self.fault.status:
            self._json({"error": "as asked"}, self.fault.status, self.fault.headers)
            return
        if self.headers.get("Authorization", f"Bearer {TOKEN}") != f"Bearer {TOKEN}":
            headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._json({"error": "Invalid credentials in Authorization header"}, 401, headers)
            return
        for verb, pattern, name in _ROUTES:
            if method in verb.split() and (match := re.fullmatch(pattern, path)):
                getattr(self, name)(**match.groupdict())
                return
        self._json({"error": f"no such page: {path}"}, 404)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and not self.fault.status:
            content, self.close_connection = content[: len(content) // 2], True
        self.wfile.write(content)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, code: str) -> None:
        self._json({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    @property
    def _is_known(self) -> bool:
        return "Authorization" in self.headers

    def _found(self, kind: str, repo: str, revision: str | None) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit, or answer with the hub's error."""
        found = self.hub.repos.get((kind, repo))
        if found is None or (found.private and not self._is_known):
            self._error(404 if self._is_known else 401, "RepoNotFound")
        elif found.gated and not self._is_known:
            self._error(401, "GatedRepo")
        elif (commit := found.find(revision or "main")) is None:
            self._error(404, "RevisionNotFound")
        else:
            return commit
        return None

    # -- reading ------------------------------------------------------------------------------------------

    def info(self, kind: str, repo: str, revision: str | None = None) -> None:
        """Describe a repository at a revision."""
        if (commit := self._found(kind, repo, revision)) is not None:
            siblings = [{"rfilename": name} for name in commit[1]]
            of = self.hub.repos[kind, repo]
            base = {"_id": "0" * 24, "id": repo, "sha": commit[0], "siblings": siblings, "tags": [], "downloads": 0}
            self._json({**base, "private": of.private, "gated": of.gated, "disabled": False, "likes": 0})

    def tree(self, kind: str, repo: str, revision: str, path: str | None = None) -> None:
        """List files, recursively or of one folder."""
        if (commit := self._found(kind, repo, revision)) is None:
            return
        begin = f"{path}/" if path else ""
        below = {name: content for name, content in commit[1].items() if name.startswith(begin)}
        if begin and not below:
            self._error(404, "EntryNotFound")
            return
        deep = self.query.get("recursive", ["false"])[0].lower() == "true"
        folders = {begin + name[len(begin) :].split("/")[0] for name in below if "/" in name[len(begin) :]}
        files = {n: c for n, c in below.items() if deep or "/" not in n[len(begin) :]}
        listed = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": name} for name in sorted(folders)]
        self._json([*([] if deep else listed), *(_described(name, content) for name, content in files.items())])

    def resolve(self, prefix: str | None, repo: str, revision: str, path: str) -> None:
        """Send a file, or the place of a large one."""
        kind = (prefix or "models/")[:-2]
        if (commit := self._found(kind, repo, revision)) is None:
            return
        if path not in commit[1]:
            self._json({}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit[0]})
            return
        content = commit[1][path]
        described = _described(path, content)
        headers = {"X-Repo-Commit": commit[0], "ETag": f'"{described["oid"]}"', "Accept-Ranges": "bytes"}
        if "lfs" in described:
            sha = described["lfs"]["oid"]
            self.hub.large[sha] = content
            linked = {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(content))}
            self._send(b"", 302, {**headers, **linked, "Location": f"{self.hub.storage}/large/{sha}"})
            return
        self._ranged(content, headers)

    def download(self, sha: str) -> None:
        """Send a large file."""
        self._ranged(self.hub.large[sha], {"ETag": f'"{sha}"'})

    def _ranged(self, content: bytes, headers: dict[str, str]) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            self._send(content, 200, headers)
            return
        start, stop = int(match[1]), int(match[2] or len(content) - 1) + 1
        place = f"bytes {start}-{stop - 1}/{len(content)}"
        self._send(content[start:stop], 206, {**headers, "Content-Range": place})

    # -- writing ------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Create a repository."""
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or 'org'}/{asked['name']}"
        if not self._is_known:
            self._error(401, "NoToken")
            return
        if asked["name"] == "not-mine":
            self._json({"error": "You don't have the rights to create a model under this namespace"}, 403)
            return
        known = (asked.get("type", "model"), name) in self.hub.repos
        if not known:
            repo = self.hub.repos[asked.get("type", "model"), name] = Repo(private=asked.get("visibility") == "private")
            repo.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._json({"url": f"{self.hub.url}/{name}"}, 409 if known else 200)

    def validate_yaml(self) -> None:
        """Accept every card."""
        self._json({"errors": [], "warnings": []})

    def preupload(self, kind: str, repo: str, revision: str) -> None:
        """Say which files are uploaded by LFS."""
        commit = self._found(kind, repo, revision)
        if commit is None:
            return
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= LARGE or file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
                "oid": _described(file["path"], commit[1][file["path"]])["oid"] if file["path"] in commit[1] else None,
            }
            for file in json.loads(self.body)["files"]
        ]
        self._json({"files": files})

    def batch(self, repo: str) -> None:
        """Say where to upload large files, whole or in parts."""
        objects = []
        for one in json.loads(self.body)["objects"]:
            href = f"{self.hub.url}/upload/{one['oid']}"
            header: dict[str, str] = {}
            if self.hub.part_bytes and one["size"] > self.hub.part_bytes:
                count = -(-one["size"] // self.hub.part_bytes)
                header = {str(n): f"{href}/{n}" for n in range(1, count + 1)}
                header["chunk_size"], href = str(self.hub.part_bytes), f"{href}/done"
            verify = {"href": f"{self.hub.url}/verify/{one['oid']}"}
            known = one["oid"] in self.hub.large
            actions = {} if known else {"actions": {"upload": {"href": href, "header": header}, "verify": verify}}
            objects.append({"oid": one["oid"], "size": one["size"], **actions})
        self._json({"transfer": "basic", "objects": objects})

    def upload(self, sha: str, part: str | None = None) -> None:
        """Take a large file, or a part of one."""
        if part is None:
            self.hub.large[sha] = self.body
        else:
            self.hub.parts.setdefault(sha, {})[int(part)] = self.body
        self._send(b"", 200, {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def complete(self, sha: str) -> None:
        """Join the parts of a large file."""
        asked = [part["partNumber"] for part in json.loads(self.body)["parts"]]
        self.hub.large[sha] = b"".join(self.hub.parts[sha][number] for number in asked)
        self._json({})

    def verify(self, sha: str) -> None:
        """Compare a large file with its hash."""
        whole = hashlib.sha256(self.hub.large[sha]).hexdigest() == sha
        self._json({}, 200 if whole else 422)

    def commit(self, kind: str, repo: str, revision: str) -> None:
        """Add a commit."""
        before = self._found(kind, repo, revision)
        if before is None:
            return
        files = dict(before[1])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header" and value.get("parentCommit", before[0]) != before[0]:
                self._json({"error": "A commit has happened since."}, 412)
                return
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        sha = self.hub.repos[kind, repo].commit(files, revision)
        self._json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})


def _described(path: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    found = {"type": "file", "oid": oid, "size": len(content), "path": path}
    if len(content) >= LARGE or path.endswith(".safetensors"):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return found


_API = rf"/api/(?P<kind>model|dataset)s/{_REPO}"
_ROUTES = (
    ("GET", rf"{_API}/revision/(?P<revision>.+)", "info"),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    ("POST", rf"{_API}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"{_API}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("GET", _API, "info"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/upload/(?P<sha>\w+)(?:/(?P<part>\d+))?", "upload"),
    ("POST", r"/upload/(?P<sha>\w+)/done", "complete"),
    ("POST", r"/verify/(?P<sha>\w+)", "verify"),
    ("GET HEAD", r"/large/(?P<sha>\w+)", "download"),
    ("GET HEAD", rf"/(?P<prefix>datasets/)?{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve an empty hub on a free port."""
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url, hub.storage = (f"http://{host}:{server.server_address[1]}" for host in ("127.0.0.1", "localhost"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def in_child() -> None:
    """Let libraries that a forked command has imported already read its environment (`tests.zygote`)."""
    import datasets.config
    import huggingface_hub.constants as constants

    home = Path(os.environ["HF_HOME"])
    for place, name in ((home / "hub", "HF_HUB_CACHE"), (home / "assets", "HF_ASSETS_CACHE")):
        setattr(constants, name, str(place))
    constants.ENDPOINT = datasets.config.HF_ENDPOINT = os.environ["HF_ENDPOINT"]
    constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{constants.ENDPOINT}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    constants.HF_HUB_DISABLE_XET = True
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = os.environ.get("HF_HUB_OFFLINE") == "1"
    datasets.config.HF_DATASETS_CACHE = home / "datasets"
