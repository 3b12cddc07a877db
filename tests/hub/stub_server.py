"""A single-user server that starts at once; standard library only, any Python 3."""

import os
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


time.sleep(float(os.environ.get("STUB_SLEEP_S", "0")))
HTTPServer(("127.0.0.1", urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"]).port), Handler).serve_forever()
