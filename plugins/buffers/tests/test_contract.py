"""Hold every component of this distribution to the contract of its kind."""

from __future__ import annotations

from slime_testing_contracts import suites

globals().update(suites("buffers", "slime_buffers", {}, globals()))
