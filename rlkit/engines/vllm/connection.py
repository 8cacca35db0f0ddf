"""One vLLM server over HTTP: its address, its deadline, and errors that a user can act on.

Every call opens its own connection: vLLM drops a kept connection after an error, and the next call on it would fail.
Nothing is sent twice, because a repeated POST draws or loads again. Proxies from the environment are not used: they do
not reach a server on the loopback or inside a cluster.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rlkit.engine import EngineError
from rlkit.engines.vllm.guard import HOSTS, SECRET, secret_for

T = TypeVar("T")
logger = logging.getLogger(__name__)
KEEP = "Nothing of the step was kept and nothing is lost"
RESUME_SECONDS = 5.0  # deadline of the resume after a failure
END_SECONDS = 10.0  # for a cancelled coroutine to close its connections


class Remote:
    """A server's address, and calls to it.

    Args:
        url: "http://host:port", or "host:port".
        deadline: seconds within which a call must be answered.
        token: the server's secret; None looks for it on this machine, then in VLLM_API_KEY (`guard.secret_for`).

    Attributes:
        unclean: its KV cache may hold NaN, from this client or an earlier one.

    Raises:
        ValueError: an address without host or port.
    """

    def __init__(self, url: str, *, deadline: float, token: str | None = None) -> None:
        text = url.strip().rstrip("/")
        parts = urlsplit(text if "://" in text else f"http://{text}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host or not (port or parts.scheme == "https"):
            raise ValueError(f"VLLMServer: expected a url such as 'http://127.0.0.1:8000', got {url!r}.")
        # OpenAI's clients need /v1 at the end of the address, so it is often copied.
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/v1')}"
        self.host, self.port = host, port or 443
        self.deadline = deadline
        self.verify = parts.scheme == "https"  # without TLS, loading the certificates would take longer than the call
        self.unclean = True
        self.is_here = _is_here(self.host)
        self._token = token
        self.headers: dict[str, str] = {}

    @property
    def where(self) -> str:
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"

    def refresh(self) -> dict[str, str]:
        """Headers of a request, with the current secret: a restarted server may have another one."""
        token = self._token or (secret_for(self.port) if self.is_here else os.environ.get(SECRET))
        # Also without a body: the guard refuses what a web page can send without a CORS preflight.
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        return self.headers

    def call(
        self, method: str, path: str, *, body: Any = None, params: Any = None, deadline: float | None = None
    ) -> Any:
        """Send a request; returns the decoded JSON, or the text of another type. `EngineError` unless it succeeds."""
        return self.read(self._send(method, path, deadline or self.deadline, json=body, params=params), path)

    def status(self, path: str) -> int:
        """Status code of a GET; `EngineError` without an answer."""
        return self._send("GET", path, self.deadline).status_code

    def _send(self, method: str, path: str, limit: float, *, json: Any = None, params: Any = None) -> Any:
        import httpx

        with self.translated(path, limit):
            return httpx.request(
                method,
                self.url + path,
                json=json,
                params=params,
                headers=self.refresh(),
                timeout=limit,
                trust_env=False,
                verify=self.verify,
            )

    def read(self, answer: Any, path: str) -> Any:
        """The decoded body of a response; `EngineError` with the server's message if its status is not 200."""
        if answer.status_code == 200:
            try:
                return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
            except ValueError as error:
                raise EngineError(f"VLLMServer: {self.where} answered {path} with broken JSON: {error}") from error
        said = _message(answer)
        if answer.status_code == 401:
            raise EngineError(
                f"VLLMServer: {self.where} asks for a secret, and the one that was sent, if any, is not its own. Set "
                f"{SECRET} here to that of the server (rlkit serve says in which file it is, when it is ready), or "
                "pass VLLMServer(policy, url=..., token=...)."
            )
        if "EngineCore" in said or "EngineDead" in said or answer.status_code == 503:
            raise EngineError(
                f"VLLMServer: the engine of the server at {self.where} has died ({said}). {KEEP}: start the server "
                "again and call sample again; the weights are sent again. Its log says why it died."
            )
        raise EngineError(f"VLLMServer: {self.where} answered {path} with {answer.status_code}: {said}")

    @contextlib.contextmanager
    def translated(self, path: str, limit: float) -> Iterator[None]:
        """Around a request of httpx: turns its exceptions into `EngineError`s with host, port, seconds and advice."""
        import httpx

        try:
            yield
        except (httpx.ConnectTimeout, httpx.ConnectError) as error:
            raise EngineError(
                f"VLLMServer: no server answers at {self.where} ({error}). {KEEP}: start it (rlkit serve MODEL --port "
                f"{self.port}) and call sample again; the weights are sent again."
            ) from error
        except httpx.TimeoutException as error:
            raise EngineError(
                f"VLLMServer: {self.where} did not answer {path} within {limit:g} s. It hangs, is stopped or is "
                f"overloaded. {KEEP}: look at the server's log, and call sample again once it answers, or start it "
                "again. A larger deadline= waits longer."
            ) from error
        except httpx.TransportError as error:
            raise EngineError(
                f"VLLMServer: {self.where} dropped the connection during {path} ({error}): the server has ended. "
                f"{KEEP}: start it again and call sample again; the weights are sent again."
            ) from error

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause generation inside; the server is resumed afterwards, also after an error."""
        try:
            self.call("POST", "/pause", params={"mode": "wait"})
            yield
        except BaseException:  # also an interrupt, and a pause that timed out but may still happen
            with contextlib.suppress(EngineError):  # the first error is the informative one
                self.call("POST", "/resume", deadline=min(RESUME_SECONDS, self.deadline))
            raise
        self.call("POST", "/resume")

    def wait_until_up(self) -> None:
        """Wait for a server that is still starting; `EngineError` after the deadline."""
        until = time.monotonic() + self.deadline
        told = False
        while True:
            try:
                code = self.status("/health")
                last = f"its /health says {code}"
            except EngineError as error:
                code, last = 0, str(error.__cause__ or error)
            if code == 200:
                return
            if code == 421:
                raise EngineError(
                    f"VLLMServer: the server at {self.where} does not know itself by the name {self.host!r}. Start "
                    f"it with {HOSTS}={self.host} in its environment, or give its address in digits as url=."
                )
            if code == 404:
                raise EngineError(
                    f"VLLMServer: what answers at {self.where} is not a vLLM server (it has no /health). url= is its "
                    f"root, {self.url!r} here. Start one with: rlkit serve MODEL, on another port."
                )
            if time.monotonic() >= until:
                raise EngineError(
                    f"VLLMServer: no vLLM server answered at {self.where} within {self.deadline:g} s ({last}). Start "
                    f"one with: rlkit serve MODEL --port {self.port}. If it needs longer, pass deadline=. If it is "
                    "elsewhere, pass its url=."
                )
            if not told:
                message = "VLLMServer: waiting up to %g s for a server at %s (%s)"
                logger.warning(message, self.deadline, self.where, last)
                told = True
            time.sleep(min(0.5, self.deadline / 10))


def _is_here(host: str) -> bool:
    """True if the host resolves to an address of this machine."""
    try:
        family, kind, _, _, (number, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind((number, 0))  # works for an address of one of this machine's own interfaces only
    except OSError:
        return False
    return True


def _message(answer: Any) -> str:
    """The server's error message, in one line."""
    try:
        found = answer.json()
    except ValueError:
        found = answer.text
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, dict):
        found = found.get("message", found)
    return " ".join(str(found).split())[:500] or "no text"


def run_apart(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on an event loop in another thread, and wait: a notebook's own thread already runs a loop.

    An interrupt cancels the coroutine, which closes its connections; vLLM then drops their requests.

    Example:
        >>> async def double():
        ...     return 2 * 21
        >>> run_apart(double)
        42
    """
    loop, ended = asyncio.new_event_loop(), threading.Event()

    async def main() -> T:
        try:
            return await work()
        finally:
            ended.set()

    thread = threading.Thread(target=loop.run_forever, name="rlkit-vllm", daemon=True)
    try:
        future = asyncio.run_coroutine_threadsafe(main(), loop)
        thread.start()
        return future.result()
    finally:  # also after an interrupt, which may come anywhere above
        future.cancel()
        ended.wait(END_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(END_SECONDS)
        if not loop.is_running():
            loop.close()
