"""`python -m pcsr_fast` is the command `pcsr-fast`."""

import sys

from pcsr_fast.cli import main

sys.exit(main())
