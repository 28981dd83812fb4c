"""`python train_async.py <flags>` is `slime train --async <flags>`: THUDM/slime's launch scripts work unchanged."""

import sys

from slime_core.cli.main import main

sys.exit(main(["train", "--async", *sys.argv[1:]]))
