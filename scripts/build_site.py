"""Build the documentation site from `docs/`, offline: `make site` runs it.

python scripts/build_site.py
python scripts/build_site.py --deploy DIR --version NAME

The pages of `docs/` are taken as they are; `docs/index.md` is the landing page, and its lists are the navigation.
`generate_docs.py` makes `docs/reference`, and mkdocstrings the page of the Python API. A page or file elsewhere in the
repository that a page links to is on the site, too. When zensical has built `build/site`, every link is followed.
`--deploy` copies the built site into a folder of versions (`.github/deploy_site`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
DOCS, BUILD = ROOT / "docs", ROOT / "build"
NEWCOMERS = ("Tutorials", "How to")
"""Sections of `docs/index.md` that a newcomer reads."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json", ".jsonl": "json"}
AS_IT_IS = (".png", ".svg")
DEV = "dev"
"""Version of the site of the main branch."""
_WHOLE_WIDTH = "---\nhide: [navigation, toc]\n---\n\n"
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^((```+).*?^\2)", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"^\| `([\w-]+)\.md` \|", re.MULTILINE)

Links = list[tuple[str, str]]
"""Titles with their links."""


def sections() -> dict[str, Links]:
    """Return section of `docs/index.md` -> the links in it."""
    found = {}
    for part in re.split(r"^## ", (DOCS / "index.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        links = [(" ".join(title.split()), target) for title, target in _LINK.findall(body)]
        found[name] = [(title[0].upper() + title[1:], target) for title, target in links]
    return found


def newcomers_pages() -> list[Path]:
    """Return the landing page and the pages of the sections that a newcomer reads."""
    links = sections()
    names = {target.partition("#")[0] for section in NEWCOMERS for _, target in links[section]}
    return [DOCS / "index.md", *sorted(DOCS / name for name in names)]


class Stage:
    """The folder that the generator reads: pages, and the files that they link to as pages."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[Path, Path] = {}
        """File of the repository -> its place in the folder."""
        self._waiting: list[Path] = []

    def write(self, files: list[Path]) -> None:
        """Write these files, and all that they link to."""
        for file in files:
            self.place(file)
        while self._waiting:
            file = self._waiting.pop()
            target = self._folder / self._places[file]
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix in AS_IT_IS:
                shutil.copyfile(file, target)
            else:
                target.write_text(self._page(file), encoding="utf-8")

    def place(self, file: Path) -> Path:
        """Return the place of a file, which is written with the others."""
        if file not in self._places:
            inside = file.is_relative_to(DOCS)
            place = file.relative_to(DOCS) if inside else Path("source", file.relative_to(ROOT))
            plain = file.suffix in (".md", *AS_IT_IS)
            self._places[file] = place if plain else place.with_name(f"{place.name}.md")
            self._waiting.append(file)
        return self._places[file]

    def _page(self, file: Path) -> str:
        """Return the text of a page, with its links as they lead from its place."""
        text = file.read_text(encoding="utf-8") if file.suffix == ".md" else _shown(file)
        if file == DOCS / "index.md":
            text = _WHOLE_WIDTH + text
        if file == DOCS / "reference.md":  # it names generated pages, which the repository does not have
            text = _NAME.sub(r"| [\1](reference/\1.md) |", text)
        fences = [match.span() for match in _FENCE.finditer(text)]
        return _LINK.sub(lambda match: match[0] if _within(match.start(), fences) else self._link(file, match), text)

    def _link(self, file: Path, match: re.Match[str]) -> str:
        name, hash_, anchor = match[2].partition("#")
        if not name or "://" in name:
            return match[0]
        target = (file.parent / name).resolve()
        if (target / "README.md").is_file():
            target /= "README.md"
        if not target.exists():
            raise SystemExit(f"{file.relative_to(ROOT)}: {match[2]}: no such file")
        place = os.path.relpath(self.place(target), self._places[file].parent)
        return f"[{match[1]}]({place}{hash_}{anchor})"


def _within(place: int, spans: list[tuple[int, int]]) -> bool:
    return any(start <= place < end for start, end in spans)


def _shown(file: Path) -> str:
    """Return the text of a page that shows a file, or the names in a folder."""
    name = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        return f"# {name}\n\n" + "".join(f"- `{path.name}`\n" for path in sorted(file.iterdir()))
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        blocks = [source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells]
        return "\n\n".join([*blocks, f"From `{name}`.\n"])
    return f"# {file.name}\n\n`{name}`\n\n`````{LANGUAGES.get(file.suffix, 'text')}\n{text}`````\n"


def api_page() -> str:
    """Return the page of the public Python names, whose documentation mkdocstrings fills in."""
    import slime_core

    lines = [
        "# Python API",
        "",
        "Names of `slime_core`, then those that read a run (`slime_runs`), from their docstrings.",
    ]
    for name in sorted(set(dir(slime_core)) - {"__version__"}, key=str.lower):
        module = slime_core._EXPORTS.get(name) or getattr(slime_core, name).__module__
        lines += ["", f"::: {module}.{name}"]
    lines += ["", "::: slime_runs.run.Run", "", "::: slime_runs.run.StoredSample", "", "::: slime_runs.index.Filter"]
    return "\n".join(lines) + "\n"


def navigation(stage: Stage) -> str:
    """Return the navigation, as TOML has it."""
    parts = {"Home": '"index.md"'}
    for section, links in sections().items():
        pages = []
        for title, target in links:
            name, _, anchor = target.partition("#")
            place = stage.place((DOCS / name).resolve())
            pages.append((title, f"{place.with_suffix('')}/#{anchor}" if anchor else str(place)))
        if section == "Reference":
            pages.append(("Python API", "reference/api.md"))
            generated = sorted((DOCS / "reference").glob("*.md"))
            pages += [(_heading(file), f"reference/{file.name}") for file in generated]
        parts[section] = "[" + ", ".join(f"{{{json.dumps(t)} = {json.dumps(page)}}}" for t, page in pages) + "]"
    return "[" + ", ".join(f"{{{json.dumps(title)} = {value}}}" for title, value in parts.items()) + "]"


def _heading(file: Path) -> str:
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def build() -> Path:
    """Build the site in `build/site`. Raises CalledProcessError if zensical does."""
    from scripts import generate_docs

    generate_docs.main()
    shutil.rmtree(BUILD, ignore_errors=True)
    pages = BUILD / "pages"
    stage = Stage(pages)
    nav = navigation(stage)
    stage.write([*DOCS.rglob("*.md"), *DOCS.rglob("*.png"), *DOCS.rglob("*.svg")])
    (pages / "reference" / "api.md").write_text(api_page(), encoding="utf-8")
    shutil.copyfile(ROOT / "scripts/site.css", pages / "site.css")
    settings = (ROOT / "scripts/site.toml").read_text(encoding="utf-8").replace("nav = []", f"nav = {nav}")
    (BUILD / "zensical.toml").write_text(settings, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean"], cwd=BUILD, check=True)
    return BUILD / "site"


class _Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names."""
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loaded |= {found[name] for name in ("href", "src") if name in found}


def broken_links(site: Path) -> list[str]:
    """Return the links of the pages that lead nowhere, and what a page loads from elsewhere."""
    pages = {file.resolve(): _Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")}
    broken = []
    for file, page in pages.items():
        for link in sorted(page.links | page.loaded):
            if "://" in link or link.startswith(("mailto:", "data:", "javascript:")):
                wrong = link in page.loaded and not link.startswith("data:")
            else:
                path, _, anchor = link.partition("#")
                base = site if path.startswith("/") else file.parent
                target = (base / unquote(path.partition("?")[0]).lstrip("/")).resolve() if path else file
                target = target / "index.html" if target.is_dir() else target
                known = pages.get(target)
                wrong = not target.exists() or bool(anchor and known and unquote(anchor) not in known.anchors)
            if wrong:
                broken.append(f"{file.relative_to(site.resolve())}: {link}")
    return broken


def add_version(site: Path, version: str, folder: Path) -> None:
    """Copy the site to `folder`/`version`. The newest version that was added is the latest; `dev` if there is no other.

    `versions.json` is the list that the menu reads, in mike's form.
    """
    shutil.rmtree(folder / version, ignore_errors=True)
    shutil.copytree(site, folder / version)
    listed = folder / "versions.json"
    before = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else []
    others = [one for one in before if one["version"] != version]
    latest = next((one["version"] for one in before if "latest" in one["aliases"]), DEV)
    latest = version if version != DEV or latest not in [one["version"] for one in others] else latest
    entries = [
        {"version": name, "title": name, "aliases": ["latest"] if name == latest else []}
        for name in (version, *(one["version"] for one in others))
    ]
    listed.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    (folder / "latest").mkdir(exist_ok=True)
    for page, target in ((folder / "index.html", f"{latest}/"), (folder / "latest/index.html", f"../{latest}/")):
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">\n', encoding="utf-8")


def main() -> int:
    """Build and check the site, or add it to a folder of versions; return 1 if a link is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deploy", type=Path, metavar="DIR", help="add the built site to this folder of versions")
    parser.add_argument("--version", default=DEV, help="name of the version, such as 0.1 (default: %(default)s)")
    own = parser.parse_args()
    if own.deploy:
        add_version(BUILD / "site", own.version, own.deploy)
        return 0
    site = build()
    if broken := broken_links(site):
        print("\n".join(broken), file=sys.stderr)
        print(f"{len(broken)} links of the site are broken", file=sys.stderr)
        return 1
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in newcomers_pages())
    print(f"{site}: {len(list(site.rglob('*.html')))} pages; a newcomer's are {words:,} words")
    return 0


if __name__ == "__main__":
    sys.exit(main())
