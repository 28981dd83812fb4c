"""Start sglang-router like `python -m sglang_router.launch_router`, without the imports of its test balancer.

`python router_main.py FLAGS...`, run by SGLang's interpreter. The package's own launcher imports the balancer, which
imports SGLang and torch: 8 seconds and 520 MB (version 0.3.2) instead of 0.1 seconds and 25 MB. If the installed
router's modules have another structure, its own launcher is used.
"""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str]) -> None:
    """Run the router until it receives a signal to stop."""
    try:
        from sglang_router.router import Router
        from sglang_router.router_args import RouterArgs

        parser = argparse.ArgumentParser(prog="sglang_router")
        RouterArgs.add_cli_args(parser, use_router_prefix=False)
        args = RouterArgs.from_cli_args(parser.parse_args(argv), use_router_prefix=False)
        router = None if args.mini_lb else Router.from_args(args)
    except (ImportError, AttributeError, TypeError) as error:
        print(f"not started directly: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        router = None
    if router is None:
        from sglang_router import launch_router

        sys.argv[1:] = argv
        launch_router.main()
    else:
        router.start()


if __name__ == "__main__":
    main(sys.argv[1:])
