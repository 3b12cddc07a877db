"""Jupyter Server extension: reports activity to the broker, and serves JupyterLab's requests.

* `extension`  lifecycle of the other modules
* `kernels`    which kernels run a cell, according to the messages that they publish
* `activity`   reports about kernels and terminals (user code can forge them, so no
               right and no limit depends on them)
* `watch`      long poll to the broker, and the Jupyter Events that result
* `handlers`   ``/gpushare/*``: requests that the broker or this server answers

No request counts as activity of the user.  Without a broker address ``status`` answers
``enabled: false``, and every request that needs the broker is answered 404 "not_configured".
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    from jupyter_gpushare.server.extension import GpuShareExtension

    return [{"module": "jupyter_gpushare.server", "app": GpuShareExtension}]
