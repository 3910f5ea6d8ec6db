"""`python -m egeria.cli` does what `egeria` does."""

import sys

from egeria.cli.main import main

sys.exit(main())
