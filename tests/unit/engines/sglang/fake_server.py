"""A process that answers as a server does while it starts: `python fake_server.py PORT [key=value ...]`.

model=NAME      of /model_info
not_ready=N     the first N answers of /health_generate are 503; -1: all of them
die=TEXT        print TEXT and exit with status 1 instead of listening
taken=FILE      while FILE exists: remove it, then die as a server whose port is taken
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
from http.server import BaseHTTPRequestHandler

port, options = int(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])
left = int(options.get("not_ready", 0))
print(f"listening at {port}", flush=True)
if "die" in options:
    print(options["die"], flush=True)
    sys.exit(1)
if os.path.exists(options.get("taken", "")):
    os.remove(options["taken"])
    print("[Errno 98] error while attempting to bind on address: address already in use", flush=True)
    sys.exit(1)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        global left
        status = 200
        if self.path == "/health_generate" and left:
            left -= 1
            status = 503
        if self.path == "/get_model_info":
            status = 404
        body = json.dumps({"model_path": options.get("model", "/models/m"), "environment": dict(os.environ)}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


Server(("127.0.0.1", port), Handler).serve_forever()
