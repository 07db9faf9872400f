"""`python3 -m dsat`."""

import sys

from dsat.cli import main

sys.exit(main())
