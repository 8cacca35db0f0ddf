"""Requests of attackers, as bytes on a socket, and what a server behind the guard must answer; HOST is host:port.

Reproduced against vLLM 0.32 alone, which obeys each of them but those that are no HTTP.
"""

import json
import socket
from urllib.parse import urlsplit

SECRET = "a-secret-of-43-characters-as-serve-makes-it"
JSON = "Content-Type: application/json"
GOOD = f"Authorization: Bearer {SECRET}"
BODY = json.dumps({"method": "rlkit_describe"})
FORM = "method=rlkit_describe"


def request(first, *headers, body="", host="Host: HOST"):
    """The bytes of one request; `host` is its Host header, or nothing."""
    lines = [first, *filter(None, [host]), *headers, f"Content-Length: {len(body)}", "Connection: close"]
    return "\r\n".join([*lines, "", body])


def rpc(*headers, host="Host: HOST", body=BODY, first="POST /collective_rpc HTTP/1.1"):
    """A call that changes the server, in the version of one attacker."""
    return request(first, *headers, body=body, host=host)


REFUSED = {
    # a page on another site: what fetch, a form, an image, and a WebSocket send
    "the curl of the report": (
        rpc("Origin: http://evil.example", "Content-Type: text/plain", host="Host: evil.example:80"),
        403,
    ),
    "fetch no-cors": (rpc("Origin: http://evil.example", "Content-Type: text/plain"), 403),
    "a sandboxed frame": (rpc("Origin: null", "Content-Type: text/plain"), 403),
    "an empty origin": (rpc("Origin:", JSON, GOOD), 403),
    "a page of the server itself": (rpc("Origin: http://HOST", JSON, GOOD), 403),
    "a form": (rpc("Origin: null", "Content-Type: application/x-www-form-urlencoded", body=FORM), 403),
    "a form with a file": (rpc("Origin: null", 'Content-Type: multipart/form-data; boundary="x"'), 403),
    "sendBeacon": (rpc("Origin: http://evil.example", "Content-Type: text/plain;charset=UTF-8"), 403),
    "preflight": (
        request(
            "OPTIONS /collective_rpc HTTP/1.1",
            "Origin: http://evil.example",
            "Access-Control-Request-Method: POST",
            "Access-Control-Request-Headers: authorization,content-type",
        ),
        403,
    ),
    "preflight of a private network": (
        request("OPTIONS /pause HTTP/1.1", "Origin: null", "Access-Control-Request-Private-Network: true"),
        403,
    ),
    "OPTIONS without an origin": (request("OPTIONS /collective_rpc HTTP/1.1"), 401),
    "a web socket": (
        request(
            "GET /v1/realtime HTTP/1.1",
            "Origin: http://evil.example",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        ),
        403,
    ),
    "health for a page": (request("GET /health HTTP/1.1", "Origin: http://evil.example"), 403),
    # DNS rebinding: the page's own name leads to this machine, and its requests have no Origin
    "rebinding": (request("GET /server_info HTTP/1.1", host="Host: evil.example:8000"), 421),
    "rebinding of the health": (request("GET /health HTTP/1.1", host="Host: evil.example"), 421),
    "rebinding with the secret": (rpc(JSON, GOOD, host="Host: evil.example"), 421),
    "a name that begins like ours": (request("GET /health HTTP/1.1", host="Host: localhost.evil.example"), 421),
    "digits that are no address": (request("GET /health HTTP/1.1", host="Host: 127.0.0.1.evil.example"), 421),
    "a user before the name": (request("GET /health HTTP/1.1", host="Host: localhost@evil.example"), 421),
    "two hosts": (request("GET /health HTTP/1.1", "Host: evil.example"), 421),
    "an empty host": (request("GET /health HTTP/1.0", host="Host:"), 421),
    "HTTP/1.0 without Host": (request("GET /health HTTP/1.0", host=""), 421),
    "HTTP/1.0 without Host, with the secret": (rpc(JSON, GOOD, host="", first="POST /pause HTTP/1.0"), 421),
    "an address in the first line": (
        request("GET http://evil.example/health HTTP/1.1", host="Host: evil.example"),
        421,
    ),
    # another program or user on the machine, or on the network
    "no secret": (rpc(JSON), 401),
    "another secret": (rpc(JSON, f"Authorization: Bearer {SECRET[:-1]}x"), 401),
    "a part of the secret": (rpc(JSON, f"Authorization: Bearer {SECRET[:-1]}"), 401),
    "more than the secret": (rpc(JSON, f"{GOOD}x"), 401),
    "no scheme": (rpc(JSON, f"Authorization: {SECRET}"), 401),
    "another scheme": (rpc(JSON, f"Authorization: Basic {SECRET}"), 401),
    "no characters": (rpc(JSON, "Authorization: Bearer"), 401),
    "two secrets": (rpc(JSON, "Authorization: Bearer x", GOOD), 401),
    "the secret in the address": (rpc(JSON, first=f"POST /collective_rpc?token={SECRET} HTTP/1.1"), 401),
    "the secret in a cookie": (rpc(JSON, f"Cookie: VLLM_API_KEY={SECRET}"), 401),
    "GET of what shows the environment": (request("GET /server_info?config_format=json HTTP/1.1"), 401),
    "GET of a path that is not there": (request("GET /nothing HTTP/1.1"), 401),
    "GET of the counters": (request("GET /metrics/ HTTP/1.1"), 401),
    "POST to the health": (rpc(JSON, first="POST /health HTTP/1.1"), 401),
    "a path below the health": (request("GET /health/../server_info HTTP/1.1"), 401),
    "two slashes": (rpc(JSON, first="POST //collective_rpc HTTP/1.1"), 401),
    "a coded path": (rpc(JSON, first="POST /%63ollective_rpc HTTP/1.1"), 401),
    "PUT": (rpc(JSON, first="PUT /collective_rpc HTTP/1.1"), 401),
    "pause": (request("POST /pause?mode=abort HTTP/1.1"), 401),
    "completions": (rpc(JSON, first="POST /v1/completions HTTP/1.1"), 401),
    "an adapter from a file": (rpc(JSON, first="POST /v1/load_lora_adapter HTTP/1.1"), 401),
    # who has the secret and sends something else than JSON: a page could get a browser to do so
    "text": (rpc("Content-Type: text/plain", GOOD), 415),
    "form-encoded": (rpc("Content-Type: application/x-www-form-urlencoded", GOOD, body=FORM), 415),
    "no type": (rpc(GOOD), 415),
    "two types": (rpc("Content-Type: text/plain", JSON, GOOD), 415),
    "JSON as a parameter": (rpc("Content-Type: text/plain; x=application/json", GOOD), 415),
    "almost JSON": (rpc("Content-Type: application/json-seq", GOOD), 415),
    "no type and no body": (request("POST /pause HTTP/1.1", GOOD), 415),
}
"""Of each attack: the request, and the status of the answer."""

PASSED = {
    "health": request("GET /health HTTP/1.1"),
    "health by name": request("GET /health HTTP/1.1", host="Host: LocalHost:8000"),
    "health by IPv6": request("GET /health HTTP/1.1", host="Host: [::1]:8000"),
    "the counters": request("GET /metrics/ HTTP/1.1", GOOD),
    "a call": rpc(JSON, GOOD),
    "a call with a charset": rpc("Content-Type: Application/JSON; charset=utf-8", GOOD),
    "HTTP/1.0": rpc(JSON, GOOD, first="POST /collective_rpc HTTP/1.0"),
}
"""Requests that must be served."""


def status_of(url, text, *, secret=SECRET):
    """Status that a server at `url` answers to the bytes of a request."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
        connection.sendall(text.replace("HOST", place.netloc).replace(SECRET, secret).encode())
        answer = b""
        while b"\r\n" not in answer:
            answer += connection.recv(1000) or b"\r\n"
    return int(answer.split()[1])


def scope_of(text):
    """The same request as an ASGI server hands it on."""
    head, _, _ = text.replace("HOST", "127.0.0.1:8000").partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    method, target, version = first.split()
    headers = [(name.lower().encode(), value.strip().encode()) for name, _, value in (x.partition(":") for x in lines)]
    kind = "websocket" if (b"upgrade", b"websocket") in headers else "http"
    place = urlsplit(target)
    scope = {"type": kind, "path": place.path, "query_string": place.query.encode(), "headers": headers}
    return scope | {"root_path": "", "http_version": version.removeprefix("HTTP/")} | (
        {"method": method} if kind == "http" else {}
    )  # fmt: skip
