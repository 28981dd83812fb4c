"""The argument parser of commands: argparse whose complaints look like all others of slime."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from slime_core.errors import ConfigError, did_you_mean


class Parser(argparse.ArgumentParser):
    """Raises ConfigError, which begins with the command's name, where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, with the choice that was probably meant."""
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if wrong:
            choices = [word.strip(" '") for word in wrong[2].split(",")]
            meant = did_you_mean(wrong[1], choices)
            message += f".{meant}" if meant else ""
        raise ConfigError(f"{self.prog}: {message}")
