"""HTML for notebooks: a run, a step, a sample. Text of models is escaped, and nothing is loaded from elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from slime_runs.scores import data_sets

from slime_core.sample import Sample

if TYPE_CHECKING:
    from slime_python.records import Run

CURVES = ("rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm")
"""Metrics that a plot and a notebook show, besides the scores of evaluations."""
_WIDTH, _HEIGHT, _MARGIN = 220, 70, 4
_LONGEST = 400
"""Characters of a prompt or response that a table shows."""
_CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;max-width:40em"'


def run_html(run: Run) -> str:
    """Return state, curves and newest samples of a run."""
    curves = "".join(curve(name, points) for name, points in run.curves().items())
    return f"<b>{escape(run.name)}</b>: {escape(run.state())}<div>{curves}</div>{samples_table(run.newest())}"


def rollout_html(kind: str, number: int, metrics: Mapping[str, float], samples: Sequence[Sample]) -> str:
    """Return the main numbers and some samples of a step or batch: the best and the worst ones."""
    names = [f"eval/{name}" for name in data_sets(metrics)]
    shown = {name: metrics[name] for name in (*names, *CURVES) if name in metrics}
    numbers = ", ".join(f"{escape(name)} {value:.4g}" for name, value in shown.items())
    ranked = sorted(samples, key=lambda sample: -_number(sample.reward))
    return f"<b>{escape(kind)} {number}</b>: {numbers}{samples_table([*ranked[:2], *ranked[2:][-2:]])}"


def sample_html(sample: Sample) -> str:
    """Return a sample as a table."""
    rows = {
        "prompt": _shown(sample.prompt, None), "response": _shown(sample.response, None), "label": sample.label,
        "reward": sample.reward, "status": sample.status.value, "tokens": sample.response_length,
    }  # fmt: skip
    body = "".join(f"<tr><th>{name}</th><td {_CELL}>{escape(str(value))}</td></tr>" for name, value in rows.items())
    return f"<table>{body}</table>"


def samples_table(samples: Sequence[Sample]) -> str:
    """Return a table with prompt, response and reward of each sample; empty without samples."""
    if not samples:
        return ""
    names = ("reward", "prompt", "response")
    rows = ((str(sample.reward), _shown(sample.prompt), _shown(sample.response)) for sample in samples)
    body = "".join(f"<tr>{''.join(f'<td {_CELL}>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>{body}</table>"


def curve(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Return a curve as SVG with its first and last value."""
    finite = [(x, y) for x, y in points if y == y and abs(y) != float("inf")]
    if not finite:
        return ""
    xs, ys = [x for x, _ in finite], [y for _, y in finite]

    def scaled(value: float, values: Sequence[float], length: int) -> float:
        low, high = min(values), max(values)
        return _MARGIN + (length - 2 * _MARGIN) * ((value - low) / (high - low) if high > low else 0.5)

    line = " ".join(f"{scaled(x, xs, _WIDTH):.1f},{_HEIGHT - scaled(y, ys, _HEIGHT):.1f}" for x, y in finite)
    text = f"{escape(name)} {ys[0]:.4g} &rarr; {ys[-1]:.4g}"
    shape = f'<polyline points="{line}" fill="none" stroke="#36c" stroke-width="1.5"/>'
    if len(finite) == 1:
        x, y = line.split(",")
        shape = f'<circle cx="{x}" cy="{y}" r="2" fill="#36c"/>'
    svg = f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{text}">{shape}</svg>'
    return f'<span style="display:inline-block;margin:4px">{svg}<br><small>{text}</small></span>'


def _shown(text: Any, longest: int | None = _LONGEST) -> str:
    """Return a prompt (text or chat messages) or response, cut in the middle if it is long."""
    messages = text if isinstance(text, list) else []
    lines = [f"{m.get('role')}: {m.get('content')}" if isinstance(m, Mapping) else str(m) for m in messages]
    shown = "\n".join(lines) if messages else str(text)
    if longest is None or len(shown) <= longest:
        return shown
    return f"{shown[: longest // 2]} ... {shown[-longest // 2 :]}"


def _number(reward: Any) -> float:
    """Return a reward as a number, for sorting; a mapping's first entry."""
    if isinstance(reward, Mapping):
        reward = reward.get("score", next(iter(reward.values()), 0.0))
    return float(reward) if isinstance(reward, (int, float)) else 0.0


def notebook() -> Any:
    """Return IPython's shell in a notebook's kernel; None elsewhere. Samples are shown as tables from then on."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    shell.display_formatter.formatters["text/html"].for_type(Sample, sample_html)
    return shell
