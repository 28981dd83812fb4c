"""`slime view` on a made run of a million samples: the first page, every other page and filter, memory.

Prints the median and the 95th percentile of each page's questions over HTTP, the time until a browser shows the first
page (with playwright and Chromium installed), and the server's largest memory. The run is made once and kept for the
next call (some minutes and about 1 GB). There is no other side: the yardsticks are 1 s, 200 ms and 500 MB, and the
exit status is 1 where one is passed.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from _harness import Parser

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script's own folder is there instead
from tests.made_run import MadeRun

FIRST_S, PAGE_S, MEMORY_MB = 1.0, 0.2, 500.0


def made(folder: Path, rollouts: int) -> Path:
    """The run, of 500 samples a rollout."""
    path, done = folder / "run", folder / f"made-{rollouts}"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"making a run of {rollouts * 500:,} samples in {folder}", flush=True)
        shape = {"groups": 62, "per_group": 8, "tokens": 30, "evaluations": 40, "items": 500}
        MadeRun(path, rollouts, **shape, commit_every=20, shadowed=60).write()
        done.touch()
    return path


def questions(rollouts: int, rng: random.Random) -> dict[str, Callable[[], tuple[str, dict[str, Any]]]]:
    """Page or filter -> one question of it, each time another."""

    def place() -> dict[str, Any]:
        rollout = rng.randrange(rollouts)
        group = rollout * 62 + rng.randrange(62)
        return {"rollout": rollout, "group": group}

    def sample() -> dict[str, Any]:
        found = place()
        return {**found, "sample": found["group"] * 8 + rng.randrange(8)}

    def score() -> float:
        return round(rng.random(), 2)

    def rollout() -> dict[str, Any]:
        return {"rollout": rng.randrange(rollouts)}

    return {
        "runs": lambda: ("runs", {}),
        "run": lambda: ("run", {}),
        "run: curves": lambda: ("metrics", {"name": ["rollout/raw_reward", "train/loss", "eval/held"]}),
        "run: new steps": lambda: ("metrics", {"name": ["train/loss"], "since": rollouts - 5}),
        "run: is there anything new": lambda: ("pulse", {}),
        "run: what it waits for": lambda: ("waits", {}),
        "run: where the time went": lambda: ("profile", {}),
        "rollout": lambda: ("rollout", rollout()),
        "rollout: text": lambda: ("search", {**rollout(), "text": f"answer {rng.randrange(100)}"}),
        "samples: best": lambda: ("samples", {"order": "best"}),
        "samples: worst above": lambda: ("samples", {"order": "worst", "min_score": score()}),
        "samples: truncated": lambda: ("samples", {"status": "truncated"}),
        "samples: dropped": lambda: ("samples", {"fate": "dropped"}),
        "samples: failed (none)": lambda: ("samples", {"status": "failed"}),
        "samples: dropped, reward, length": lambda: (
            "samples", {"fate": "dropped", "min_score": score(), "max_tokens": 28, "order": "best"},
        ),
        "group": lambda: ("group", place()),
        "sample": lambda: ("sample", sample()),
        "timeline": lambda: ("timeline", {"rollout": rng.randrange(min(rollouts, 800))}),
        "evaluation": lambda: ("evaluation", {"data_set": "held"}),
        "shadows": lambda: ("shadows", {}),
        "row of the data": lambda: ("prompt", {"row": rng.randrange(1000)}),
    }  # fmt: skip


def first_page(url: str) -> float | None:
    """Seconds until a browser shows the run; None without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    program = shutil.which("chromium")
    if program is None:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto("about:blank")
        start = time.perf_counter()
        page.goto(url)
        page.wait_for_selector("main[data-ready=run] .chart")
        seconds = time.perf_counter() - start
        browser.close()
    return seconds


def memory_mb(pid: int) -> float:
    """The process's largest resident memory."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found, "Linux"
    return int(found[1]) / 1e3


def measure(url: str, rollouts: int, times: int) -> bool:
    """Print the table; whether all pages are within the yardstick."""
    fine = True
    base, rng = url.split("?")[0], random.Random(0)
    with httpx.Client(base_url=base, follow_redirects=True, timeout=60) as client:
        client.get(url).raise_for_status()
        print(f"{'page':34}{'median ms':>12}{'p95 ms':>10}{'kB':>8}")
        for name, question in questions(rollouts, rng).items():
            seconds, size = [], 0
            for _ in range(times):
                what, parameters = question()
                start = time.perf_counter()
                answer = client.get(f"api/{what}", params=parameters)
                seconds.append(time.perf_counter() - start)
                answer.raise_for_status()
                size = max(size, len(answer.content))
            p95 = statistics.quantiles(seconds, n=20)[-1]
            fine = fine and p95 <= PAGE_S
            print(f"{name:34}{1e3 * statistics.median(seconds):12.1f}{1e3 * p95:10.1f}{size / 1e3:8.0f}", flush=True)
    return fine


def main() -> int:
    """Make, serve, ask."""
    parser = Parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmark-view"), help="where the run is made")
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--times", type=int, default=40, help="questions per page")
    options = parser.parse_args()
    path = made(options.folder, options.rollouts)
    start = time.perf_counter()
    command = [sys.executable, "-m", "slime_core", "view", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split(" on ")[1].strip()
            print(f"address printed after {time.perf_counter() - start:.2f} s")
            shown = first_page(url)
            print("first page: " + ("no browser" if shown is None else f"{shown:.2f} s in Chromium"))
            fine = measure(url, options.rollouts, options.times)
            memory = memory_mb(server.pid)
            print(f"server's memory at its largest: {memory:.0f} MB")
        finally:
            server.send_signal(signal.SIGTERM)
    return int(not (fine and memory <= MEMORY_MB and (shown or 0.0) <= FIRST_S))


if __name__ == "__main__":
    sys.exit(main())
