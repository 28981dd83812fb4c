"""`python -m slime_core` is `slime`."""

import sys

from slime_core.cli.main import main

sys.exit(main())
