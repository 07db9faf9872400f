"""`python3 -m dsat`."""

import sys

from dsat.cli.main import main

sys.exit(main())
