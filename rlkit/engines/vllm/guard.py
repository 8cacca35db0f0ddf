"""Who may talk to a vLLM server: an ASGI middleware that vLLM loads (`--middleware rlkit.engines.vllm.guard.Guard`).

In development mode vLLM lets every client change the weights and write files, its own key covers `/v1` only, and it
answers any web page: CORS allows all origins, and `/collective_rpc` parses a body of any type. So each request needs
the server's secret as a bearer token; `GET /health` alone does not. Browsers are kept out twice more: by the `Origin`
header, which they send with everything a page could change, and by the `Host` header, which after DNS rebinding names
the attacker's site. A body must be declared as JSON, which a page cannot do without asking first (CORS preflight).

The secret is in VLLM_API_KEY for the server's processes. `rlkit serve` also writes it to a file that only its user can
read, where clients on the same machine find it; see `secret_for`. Without any import of vLLM's or rlkit's heavy parts.
"""

import contextlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from rlkit.engines.vllm.cleanup import all_in_namespace, remove_left

MIDDLEWARE = "rlkit.engines.vllm.guard.Guard"
SECRET = "VLLM_API_KEY"
HOSTS = "RLKIT_SERVE_HOSTS"
"""Environment variable: further names, with commas between, by which clients may address the server."""
PREFIX = "rlkit-serve-"
"""Of the folders in the temporary directory in which `rlkit serve` keeps a log, a model, and the secret."""
SAFE_METHODS = ("GET", "HEAD")
HOST = re.compile(r"(\[(?P<digits>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]*)?")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Guard:
    """Passes on the requests that hold the server's secret, and answers the others itself.

    Raises:
        RuntimeError: there is no secret in the environment; the server does not start.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app
        secret = os.environ.get(SECRET)
        if not secret:
            raise RuntimeError(
                f"{MIDDLEWARE}: {SECRET} is not set. Put a secret there, for the server and its clients."
            )
        self._expected = f"Bearer {secret}".encode()
        own = socket.gethostname()
        given = os.environ.get(HOSTS, "").split(",")
        self._hosts = {name.strip().lower() for name in ["localhost", own, own.split(".")[0], *given] if name.strip()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI wants it."""
        refusal = self.refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
        else:
            status, text = refusal
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode()})

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason, or None for a request that may pass."""

        def values(name: bytes) -> list[bytes]:
            return [value for key, value in scope["headers"] if key.lower() == name]

        if values(b"origin"):
            return 403, "requests of web pages (Origin) are refused"
        if not _is_known(values(b"host"), self._hosts):
            return 421, f"this name of the server (Host) is not known to it; {HOSTS} lists further ones"
        method = scope.get("method", "GET")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and method == "GET" and path == "/health":
            return None
        given = values(b"authorization")
        if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
            return 401, f"the server's secret is missing or wrong (Authorization: Bearer, {SECRET})"
        types = [value.split(b";")[0].strip().lower() for value in values(b"content-type")]
        if method not in SAFE_METHODS and types != [b"application/json"]:
            return 415, "Content-Type must be application/json"
        return None


def _is_known(given: list[bytes], names: Iterable[str]) -> bool:
    """One Host header, with a known name or an address in digits, which no rebinding can reach."""
    found = HOST.fullmatch(given[0].decode("latin-1").lower()) if len(given) == 1 else None
    if found is None:
        return False
    name = found["digits"] or found["name"].removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in names
    return True


def new_secret() -> str:
    """The user's own secret, from VLLM_API_KEY, or a random one."""
    return os.environ.get(SECRET) or secrets.token_urlsafe(32)


def write_secret(folder: Path, port: int, secret: str) -> Path:
    """Keep the secret where this user's clients find it; nobody else can read the file.

    Args:
        folder: of this process, from `scratch_folder(PREFIX)`, which goes with it.
        port: of the server.
        secret: what its clients must send.
    """
    file = folder / f"secret-{port}"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as output:
        output.write(secret)
    return file


def secret_for(port: int) -> str | None:
    """Secret of this user's `rlkit serve` at a port of this machine, else VLLM_API_KEY, else None."""
    temporary = Path(tempfile.gettempdir())
    remove_left(temporary, PREFIX)  # of servers that were killed
    found = []
    for folder in temporary.glob(f"{all_in_namespace(PREFIX)}*"):
        with contextlib.suppress(OSError):  # a server that ends at this moment takes it along
            # The folder's owner decides: in /tmp everybody may make one of that name, or a link.
            if folder.lstat().st_uid == os.getuid():
                file = folder / f"secret-{port}"
                found.append((file.stat().st_mtime, file.read_text(encoding="ascii")))
    return max(found)[1] if found else os.environ.get(SECRET)
