"""``python -m onediff_ext``."""

import sys

from onediff_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
