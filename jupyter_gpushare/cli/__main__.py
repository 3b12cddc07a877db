"""``python -m jupyter_gpushare.cli`` is ``gpushare``."""

import sys

from jupyter_gpushare.cli import main

sys.exit(main())
