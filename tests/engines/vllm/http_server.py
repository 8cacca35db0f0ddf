"""A small real HTTP server that answers as a table says: what some vLLM says, or what none should."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from waiting import LONG, until

HANG, DROP = object(), object()


@contextlib.contextmanager
def answering(table):
    """Serve a table of path -> body, (status, body), HANG or DROP; paths that it lacks are 404. Gives url and calls."""
    calls, ended = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            calls.append((self.command, self.path))
            answer = table.get(path, (404, {"detail": "Not Found"}))
            if callable(answer):
                answer = answer()
            if answer is HANG:
                ended.wait(LONG)
                return
            if answer is DROP:
                self.connection.close()
                return
            status, body = answer if isinstance(answer, tuple) else (200, answer)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.do_GET()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", calls
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def counting(start=0):
    """The counters of a server that draws: one token more each time they are read."""
    drawn = iter(range(start, 10**6))
    return lambda: f'vllm:generation_tokens_total{{engine="0"}} {next(drawn)}\n'


def after(true, answer):
    """An answer that comes once something holds."""

    def give():
        until(true, "the moment of the answer")
        return answer

    return give
