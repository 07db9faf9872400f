"""Entry point of `python3 -m dsat`."""

import os
import sys

# `-m` puts the working folder first on the path, where a file may shadow a library of dsat.
if os.path.isdir(".") and os.getcwd() == sys.path[0] != os.path.dirname(
    os.path.dirname(os.path.abspath(__file__))
):
    del sys.path[0]

from dsat.cli.main import main

sys.exit(main())
