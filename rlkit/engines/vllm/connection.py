"""One vLLM server over HTTP: its address, its deadline, and errors that a user can act on.

Every call has a connection of its own: vLLM drops a kept connection after an error, and the next call on it would fail
for no reason (the shared study, trap 14). Nothing is sent twice: a repeated POST draws or loads again. Proxies from the
environment are not used; an engine is reached directly or not at all (known_faults B58).
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rlkit.engine import EngineError
from rlkit.engines.vllm.guard import HOSTS, SECRET, secret_for

T = TypeVar("T")
KEEP = "Nothing of the step was kept and nothing is lost"


class NoVLLM(EngineError):
    """Something else answers: to wait would not help."""


class Remote:
    """A server as one address.

    Args:
        url: "http://host:port", or "host:port".
        deadline: seconds in which a call must be answered.
        token: the server's secret; None looks for it on this machine, then in VLLM_API_KEY (`guard.secret_for`).

    Attributes:
        unclean: NaN may be in its cache of keys and values, from this client or from one before.

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
        # OpenAI's clients want /v1 at the end of the address, and so it is often copied.
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/v1')}"
        self.host, self.port = host, port or 443
        self.deadline = deadline
        self.verify = parts.scheme == "https"  # reading the certificates takes longer than a call that needs none
        self.unclean = True
        self.is_here = _is_here(self.host)
        self._token = token
        self.headers: dict[str, str] = {}

    @property
    def where(self) -> str:
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"

    def refresh(self) -> dict[str, str]:
        """Headers of a request; a server that was started again may have another secret."""
        token = self._token or (secret_for(self.port) if self.is_here else os.environ.get(SECRET))
        # Also where there is no body: the server takes nothing that a page could send without being asked (`guard`).
        self.headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        return self.headers

    def call(
        self, method: str, path: str, *, body: Any = None, params: Any = None, deadline: float | None = None
    ) -> Any:
        """One request, and its answer as Python values (text where it is no JSON).

        Raises:
            EngineError: no answer, or one that says no.
        """
        import httpx

        limit = deadline or self.deadline
        with self.translated(path, limit):
            answer = httpx.request(
                method,
                self.url + path,
                json=body,
                params=params,
                headers=self.refresh(),
                timeout=limit,
                trust_env=False,
                verify=self.verify,
            )
        return self.read(answer, path)

    def status(self, path: str) -> int:
        """Status code of a GET, whatever it is.

        Raises:
            EngineError: no answer.
        """
        import httpx

        with self.translated(path, self.deadline):
            answer = httpx.get(
                self.url + path, headers=self.refresh(), timeout=self.deadline, trust_env=False, verify=self.verify
            )
        return answer.status_code

    def read(self, answer: Any, path: str) -> Any:
        """Values of an answer of httpx.

        Raises:
            EngineError: the answer says no; with the server's own words.
        """
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
                "again and call sample again; the weights are sent anew. Its log says why it died."
            )
        raise EngineError(f"VLLMServer: {self.where} answered {path} with {answer.status_code}: {said}")

    def translated(self, path: str, limit: float) -> "_Translated":
        """Around a request of httpx: its exceptions become errors that name host, port, seconds and what to do."""
        return _Translated(self, path, limit)

    def wait_until_up(self) -> None:
        """Wait for a server that is still starting.

        Raises:
            EngineError: it was not there in time.
        """
        until = time.monotonic() + self.deadline
        told = False
        while True:
            last = ""
            try:
                code = self.status("/health")
                if code == 200:
                    return
                if code == 421:
                    raise NoVLLM(
                        f"VLLMServer: the server at {self.where} does not know itself by the name {self.host!r}. Start "
                        f"it with {HOSTS}={self.host} in its environment, or give its address in digits as url=."
                    )
                if code == 404:
                    raise NoVLLM(
                        f"VLLMServer: what answers at {self.where} is no vLLM server (it has no /health). url= is its "
                        f"root, {self.url!r} here. Start one with: rlkit serve MODEL, on another port."
                    )
                last = f"its /health says {code}"
            except NoVLLM:
                raise
            except EngineError as error:
                last = str(error.__cause__ or error)
            if time.monotonic() >= until:
                raise EngineError(
                    f"VLLMServer: no vLLM server answered at {self.where} within {self.deadline:g} s ({last}). Start "
                    f"one with: rlkit serve MODEL --port {self.port}. If it needs longer, pass deadline=. If it is "
                    "elsewhere, pass its url=."
                )
            if not told:
                import logging

                logging.getLogger(__name__).warning(
                    "VLLMServer: waiting up to %g s for a server at %s (%s)", self.deadline, self.where, last
                )
                told = True
            time.sleep(min(0.5, self.deadline / 10))


class _Translated:
    def __init__(self, remote: Remote, path: str, limit: float) -> None:
        self.remote, self.path, self.limit = remote, path, limit

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import httpx

        where = self.remote.where
        if isinstance(error, httpx.ConnectTimeout | httpx.ConnectError):
            raise EngineError(
                f"VLLMServer: no server answers at {where} ({error}). {KEEP}: start it (rlkit serve MODEL --port "
                f"{self.remote.port}) and call sample again; the weights are sent anew."
            ) from error
        if isinstance(error, httpx.TimeoutException):
            raise EngineError(
                f"VLLMServer: {where} did not answer {self.path} within {self.limit:g} s. It hangs, is stopped or is "
                f"overloaded. {KEEP}: look at the server's log, and call sample again once it answers, or start it "
                "again. A larger deadline= waits longer."
            ) from error
        if isinstance(error, httpx.TransportError):
            raise EngineError(
                f"VLLMServer: {where} dropped the connection during {self.path} ({error}): the server has ended. "
                f"{KEEP}: start it again and call sample again; the weights are sent anew."
            ) from error


def _is_here(host: str) -> bool:
    """True if the address is one of this machine's, under whatever name."""
    try:
        family, kind, _, _, (number, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind((number, 0))  # works for an address of one of this machine's own interfaces only
    except OSError:
        return False
    return True


def _message(answer: Any) -> str:
    """The server's own words, in one line."""
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
    """Run a coroutine on an event loop in a thread of its own, and wait: a notebook's thread has a loop already.

    An interrupt cancels the coroutine, which closes its connections; vLLM then drops their requests.

    Example:
        >>> async def double():
        ...     return 2 * 21
        >>> run_apart(double)
        42
    """
    started, finished = threading.Event(), threading.Event()
    running: dict[str, Any] = {}

    async def main() -> None:
        running["loop"], running["task"] = asyncio.get_running_loop(), asyncio.current_task()
        started.set()
        running["result"] = await work()

    def body() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:  # handed to the caller's thread, whatever it is
            running["error"] = error
        finally:
            started.set()
            finished.set()

    thread = threading.Thread(target=body, name="rlkit-vllm", daemon=True)
    try:
        thread.start()  # it waits for the thread: an interrupt may come here too
        # Not Thread.join: interrupted, it takes a running thread for one that has ended (Python 3.8 to 3.12).
        while not finished.wait(0.1):
            pass
    except BaseException:
        if thread.ident is not None:
            started.wait()
            with contextlib.suppress(KeyError, RuntimeError):  # it never began, or its loop is closed at this moment
                running["loop"].call_soon_threadsafe(running["task"].cancel)
            finished.wait(10)
        raise
    if "error" in running:
        raise running["error"]
    return running["result"]
