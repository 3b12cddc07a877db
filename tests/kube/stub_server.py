"""A server of a pod that is up in a moment, at the address of its pod; standard library only."""

import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


url = urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
HTTPServer((url.hostname, url.port), Handler).serve_forever()
