"""A package index on this machine: wheels of a folder, by the simple API as JSON or HTML, or as a plain folder."""

from __future__ import annotations

import base64
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from packaging.utils import parse_wheel_filename

JSON = "application/vnd.pypi.simple.v1+json"


class Index:
    """Contents of the server and form of its answers; tests change them while it serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.form = "json"
        """json, html (with metadata files), or plain: links of a folder and nothing else."""
        self.user = ""
        """`name:password` that each request needs."""
        self.delay_s = 0.0
        self.yanked: set[str] = set()
        self.asked: list[str] = []
        self.url = ""

    def projects(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for file in sorted(self.folder.glob("*.whl")):
            found.setdefault(parse_wheel_filename(file.name)[0], []).append(file)
        return found

    def page(self, path: str) -> tuple[bytes, str] | None:
        """Return body and type, or None for nothing."""
        base, _, name = path.strip("/").partition("/")
        if base == "files":
            file = self.folder / name.removesuffix(".metadata")
            if not file.is_file() or (self.form == "plain" and name.endswith(".metadata")):
                return None
            body = metadata_of(file) if name.endswith(".metadata") else file.read_bytes()
            return body, "application/octet-stream"
        projects = self.projects()
        if base != "simple" or (name and name not in projects):
            return None
        return self._project(projects[name]) if name else self._names(projects)

    def _names(self, projects: dict[str, list[Path]]) -> tuple[bytes, str]:
        if self.form == "json":
            listed = [{"name": name} for name in projects]
            return json.dumps({"meta": {"api-version": "1.1"}, "projects": listed}).encode(), JSON
        slash = "/" * (self.form == "plain")
        return "".join(f'<a href="{name}/">{name}{slash}</a><br>' for name in projects).encode(), "text/html"

    def _project(self, files: list[Path]) -> tuple[bytes, str]:
        name = parse_wheel_filename(files[0].name)[0]
        if self.form == "json":
            listed = [
                {
                    "filename": file.name, "url": f"../../files/{file.name}", "hashes": {}, "core-metadata": True,
                    "yanked": "broken" if file.name in self.yanked else False,
                }
                for file in files
            ]  # fmt: skip
            return json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": listed}).encode(), JSON
        offered = ' data-core-metadata="true"' * (self.form == "html")
        links = (
            f'<a href="../../files/{file.name}"{offered}{" data-yanked" * (file.name in self.yanked)}>{file.name}</a>'
            for file in files
        )
        return "".join(links).encode(), "text/html"


def metadata_of(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA")))


@contextmanager
def serving(folder: Path) -> Iterator[Index]:
    """Serve the wheels of a folder until the block ends."""
    index = Index(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.append(self.path)
            time.sleep(index.delay_s)
            wanted = f"Basic {base64.b64encode(index.user.encode()).decode()}"
            if index.user and self.headers.get("Authorization") != wanted:
                return self._answer(401, b"who are you", "text/plain")
            found = index.page(unquote(self.path))
            return self._answer(200, *found) if found else self._answer(404, b"none", "text/plain")

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def write_wheel(
    folder: Path, name: str, version: str = "1.0", *, keywords: str = "slime-plugin", entry_points: str = "",
    requires: tuple[str, ...] = (), module: str = "", summary: str = "",
) -> Path:  # fmt: skip
    """Write a wheel of one module by hand, as the specification of binary distributions has it."""
    package = name.replace("-", "_")
    info = f"{package}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Summary: {summary}"] if summary else []
    metadata += [f"Keywords: {keywords}"] if keywords else []
    metadata += [f"Requires-Dist: {text}" for text in requires]
    texts = {
        f"{package}.py": module,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    texts[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*texts, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{package}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return folder / f"{package}-{version}-py3-none-any.whl"
