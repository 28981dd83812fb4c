"""Does a plugin fit the slime that is running?

Each kind has an API version, a number in its row of the table of kinds, raised when plugins of before it would break.
A plugin says which one it was written for with `slime_api = 2`, in its class or in the module that the entry point
names; without, it is 1. Which versions of slime a distribution wants is its requirement on slime-rl-core, and pip's to
see to.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import Any

import slime_core
from slime_core.distributions import CORE
from slime_core.errors import PluginIncompatibleError
from slime_core.plugins.kind import Kind
from slime_core.plugins.registry import ComponentRef

logger = logging.getLogger(__name__)

DECLARED = "slime_api"
"""The attribute of a component, or of its module."""


def check_api(kind: Kind, obj: Any, module: ModuleType | None, ref: ComponentRef, origin: str = "") -> None:
    """Whether the component is written for the API of its kind; one version too old is said and let pass.

    Args:
        kind: Its row.
        obj: The component.
        module: What its entry point names; None for an object that was registered by code.
        ref: Where it came from.
        origin: What asked for it, for the message.

    Raises:
        PluginIncompatibleError: It is written for a newer API, or for one that is not loaded any more.
    """
    written = getattr(obj, DECLARED, getattr(module, DECLARED, 1))
    if written == kind.api:
        return
    subject = f"{origin}: {ref.label}" if origin else ref.label
    if type(written) is not int:
        raise PluginIncompatibleError(f"{subject}: {DECLARED} is {written!r}; expected a number, such as {kind.api}")
    what = f"{subject} is written for version {written} of the API of {kind.name}"
    running = f"{CORE} {slime_core.__version__}"
    if written > kind.api:
        raise PluginIncompatibleError(f"{what}, {running} has {kind.api}. To have it: pip install --upgrade {CORE}")
    newer = f"To mend it: {ref.install_hint}" if ref.distribution else f"Edit {ref.target}"
    remedy = f"{newer}; docs/plugins/index.md says what has changed, and {DECLARED} = {kind.api} that it is done"
    if written not in kind.deprecated:
        raise PluginIncompatibleError(f"{what}, {running} has {kind.api}. {remedy}")
    _warn(f"{what}, which goes in the next version; {running} has {kind.api}. {remedy}")


@cache
def _warn(text: str) -> None:
    """Once: a run resolves some components for every sample."""
    logger.warning("%s", text)
