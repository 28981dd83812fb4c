"""Raise an exception in another thread, which CPython does at the thread's next bytecode."""

from __future__ import annotations

import ctypes
import threading


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception of this class in the thread with that identifier, if there is one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def take_late(error: type[BaseException]) -> None:
    """Take an exception that `raise_in` may have raised in this thread too late for the code it was meant for.

    It is raised here and caught. CPython's own way to cancel it leaves its request for a check set, and 3.11 then hangs
    in the next function that a profiler watches.
    """
    try:
        raise_in(threading.get_ident(), error)
        while True:
            pass
    except error:
        return
