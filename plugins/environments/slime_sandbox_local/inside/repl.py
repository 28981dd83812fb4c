"""Runs pieces of Python one after the other in one namespace: a line of JSON in, a line on descriptor 3 when done.

`interpreter.py` sends this file's text to `python -c` in a sandbox. As in a notebook, the value of a last expression is
printed. The code runs in the same process and may do anything to it; what it can forge is its own output.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
import traceback
import types
from typing import Any


def run(code: str, names: dict[str, Any]) -> bool:
    """Whether it ran without raising; what it raises is printed, without this file's frames."""
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit as stop:
        print(f"SystemExit: {stop.code}", file=sys.stderr)
        return False
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != "<code>":
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames, chain=False)
        return False
    return True


def main() -> None:
    """Until the input ends."""
    module = types.ModuleType("__main__")
    lines, mark = os.fdopen(os.dup(0), "rb"), 3
    # What the code reads or starts gets no part of the calls that follow.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.set_inheritable(mark, False)
    sys.modules["__main__"] = module
    for line in lines:
        done = run(json.loads(line), vars(module))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.write(mark, b"ok\n" if done else b"failed\n")


if __name__ == "__main__":
    main()
