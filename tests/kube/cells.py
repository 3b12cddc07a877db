"""The server of a pod: it runs posted cells one after the other, and keeps their variables."""

import contextlib
import io
import os
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

variables = {"__name__": "__main__"}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer("")

    def do_POST(self):
        code = self.rfile.read(int(self.headers["Content-Length"])).decode()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                exec(code, variables)
            except Exception:
                traceback.print_exc(file=printed)
        self._answer(printed.getvalue().strip())

    def _answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


url = urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
ThreadingHTTPServer((url.hostname, url.port), Handler).serve_forever()
