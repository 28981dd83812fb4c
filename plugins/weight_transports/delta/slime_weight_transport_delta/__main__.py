"""`python -m slime_weight_transport_delta`: `slime pull-weights` without the rest of slime's command line."""

from __future__ import annotations

import argparse
import sys

from slime_core.errors import ConfigError, SlimeError
from slime_weight_transport_delta.command import add_arguments, run


def main() -> int:
    """Run it; the exit status is that of the command."""
    parser = argparse.ArgumentParser(prog="python -m slime_weight_transport_delta", allow_abbrev=False)
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except SlimeError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
