"""Inside a user's Jupyter server: tells the broker what kernels do, and the page what the broker says.

* `extension`  starts and ends the rest with the server
* `activity`   what kernels and terminals do, for the broker (a hint: user code
               could forge it, so rights and limits never rest on it)
* `watch`      the one long poll for news, and the Jupyter Events made of it
* `handlers`   ``/gpushare/*``, for JupyterLab

Nothing here counts as activity of the user, and without a broker address
everything answers that there is none.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    from jupyter_gpushare.server.extension import GpuShareExtension

    return [{"module": "jupyter_gpushare.server", "app": GpuShareExtension}]
