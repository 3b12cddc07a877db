"""The benchmarks' replacement for JupyterLab: it answers any request, and uses the GPU on request.

``GET .../hold?bytes=N`` takes GPU memory.  ``GET .../call`` makes one CUDA call and
answers the milliseconds until it returned.
"""

from __future__ import annotations

import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Handler(BaseHTTPRequestHandler):
    gpu = None
    held = None

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        verb = url.path.rpartition("/")[2]
        text = ""
        if verb == "hold":
            from jupyter_gpushare import demo_gpu

            Handler.gpu = demo_gpu.open()
            Handler.held = Handler.gpu.allocate(int(parse_qs(url.query)["bytes"][0]))
            text = str(os.getpid())
        elif verb == "call":
            assert Handler.gpu is not None
            before = time.perf_counter()
            Handler.gpu.call("cuCtxSynchronize")
            text = f"{1000 * (time.perf_counter() - before):.3f}"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_arguments: object) -> None:
        pass


if __name__ == "__main__":
    port = urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"]).port
    assert port is not None
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
