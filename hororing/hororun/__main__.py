"""``python -m hororing.hororun``: the same as the command hororun."""

import sys

from hororing.hororun.command import main

if __name__ == "__main__":
    sys.exit(main())
