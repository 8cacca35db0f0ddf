"""Access control of a vLLM server: an ASGI middleware (`--middleware rlkit.engines.vllm.guard.Guard`) and its secret.

In development mode vLLM lets every client change the weights and write files, its own key covers `/v1` only, and it
answers any web page: CORS allows all origins, and `/collective_rpc` parses a body of any type. So each request except
`GET /health` needs the server's secret as a bearer token. Browsers are refused in two more ways: by the `Origin`
header, which they send with every request that could change anything, and by the `Host` header, which after DNS
rebinding names the attacker's site. A body must be declared as JSON, which a page cannot do without a CORS preflight.

The server's processes have the secret in VLLM_API_KEY. `rlkit serve` also writes it to a file that only its user can
read, where clients on the same machine find it (`secret_for`).
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
"""Environment variable: comma-separated further host names by which clients may address the server."""
PREFIX = "rlkit-serve-"
"""Of `rlkit serve`'s temporary folders, which hold the log, the model and the secret."""
SAFE_METHODS = ("GET", "HEAD")
HOST = re.compile(r"(\[(?P<digits>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:[0-9]*)?")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Guard:
    """Forwards the requests that carry the server's secret, and refuses the others.

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
        """Serve one connection (ASGI)."""
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
        """Status and reason of a refusal; None for a request that may pass."""

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
    """True for one Host header with a known name or a numeric address, which DNS rebinding cannot forge."""
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
    """VLLM_API_KEY if it is set, else a random secret."""
    return os.environ.get(SECRET) or secrets.token_urlsafe(32)


def write_secret(folder: Path, port: int, secret: str) -> Path:
    """Write the secret of the server at `port` to a file in `folder` (of `scratch_folder(PREFIX)`), mode 600."""
    file = folder / f"secret-{port}"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as output:
        output.write(secret)
    return file


def secret_for(port: int) -> str | None:
    """Secret of this user's `rlkit serve` at `port` of this machine, else VLLM_API_KEY, else None."""
    temporary = Path(tempfile.gettempdir())
    remove_left(temporary, PREFIX)  # of killed servers
    found = []
    for folder in temporary.glob(f"{all_in_namespace(PREFIX)}*"):
        with contextlib.suppress(OSError):  # a server that ends now deletes it
            # Only this user's: in /tmp anybody can create a folder or a link of that name.
            if folder.lstat().st_uid == os.getuid():
                file = folder / f"secret-{port}"
                found.append((file.stat().st_mtime, file.read_text(encoding="ascii")))
    return max(found)[1] if found else os.environ.get(SECRET)
