"""`python -m tools.prices`."""

import sys

from tools.prices.refresh import main

sys.exit(main(sys.argv[1:]))
