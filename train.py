"""`python train.py <flags>` is `slime train <flags>`: THUDM/slime's launch scripts work unchanged."""

import sys

from slime_core.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
