"""Prints every notification of Alertmanager, a line an alert."""
import http.server
import json
import signal
import sys
import time


class Pager(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for alert in body["alerts"]:
            print(time.strftime("%H:%M:%S"), self.path.strip("/").upper(), alert["status"], alert["annotations"].get("summary", alert["labels"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


# The first process of a container is not ended by a signal that it does not handle.
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
http.server.ThreadingHTTPServer(("", 8080), Pager).serve_forever()
