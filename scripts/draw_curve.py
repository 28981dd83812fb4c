"""Draw `docs/images/demo.svg` from a run of the demo: reward and held-out accuracy by rollout.

python scripts/draw_curve.py outputs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from slime_runs import Run

FILE = Path(__file__).resolve().parents[1] / "docs/images/demo.svg"
CURVES = {"eval/addition": ("#3f7fd0", "held-out accuracy"), "rollout/raw_reward": ("#d08020", "reward")}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 420, 56, 20, 20, 52
GREY = "#8a8f98"
"""Legible on a light and on a dark page."""


def draw(run: Run) -> str:
    """Return the picture."""
    curves = {name: run.series(name) for name in CURVES}
    last = max(step for curve in curves.values() for step, _ in curve)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: float, value: float) -> tuple[float, float]:
        return round(LEFT + wide * step / last, 1), round(TOP + high * (1 - value), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        f' font-size="15" fill="{GREY}">',
        "<title>Reward and held-out accuracy of the demo by rollout</title>",
    ]
    for value in (0, 0.25, 0.5, 0.75, 1):
        x, y = place(0, value)
        parts.append(f'<path d="M{x} {y}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.35"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 5}" text-anchor="end">{value:g}</text>')
    for step in range(0, last + 1, 10):
        x, y = place(step, 0)
        parts.append(f'<text x="{x}" y="{y + 22}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 8}" text-anchor="middle">rollouts</text>')
    for number, (name, (colour, label)) in enumerate(CURVES.items()):
        points = " ".join(f"{x},{y}" for x, y in (place(*point) for point in curves[name]))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="3"/>')
        y = HEIGHT - BOTTOM - 40 + 22 * number
        parts.append(f'<text x="{WIDTH - RIGHT - 8}" y="{y}" text-anchor="end" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(draw(Run(sys.argv[1])), encoding="utf-8")
