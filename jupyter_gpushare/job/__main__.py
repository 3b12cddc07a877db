"""``python -m jupyter_gpushare.job``: see `jupyter_gpushare.job.runner`."""

import sys

from jupyter_gpushare.job.runner import main

if __name__ == "__main__":
    sys.exit(main())
