"""Many cases in one test, where pytest's own work for each would be the most of it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def sweep(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, for cases that share their fixtures: all are tried, each that fails is named."""
    words, listed = names.replace(",", " ").split(), list(cases)
    assert listed, "no cases"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed: list[Exception] = []
            for case in listed:
                given = dict(zip(words, case if len(words) > 1 else [case], strict=True))
                try:
                    test(**given, **fixtures)
                except Exception as error:
                    error.add_note(f"case: {given!r}")
                    failed.append(error)
            if len(failed) == 1:
                raise failed[0]
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(listed)} cases", failed)

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in words]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
