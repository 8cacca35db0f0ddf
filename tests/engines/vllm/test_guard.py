"""The guard of a vLLM server: the attacks of `attacks`, and how its secret reaches the client and nobody else."""

import asyncio
import os
import re
import socket
import stat
import tempfile
import threading
from urllib.parse import unquote

import pytest
from engines.vllm.attacks import PASSED, REFUSED, SECRET, request, scope_of, status_of
from waiting import until

from rlkit.engines.vllm import guard, server_settings
from rlkit.engines.vllm.cleanup import scratch_folder
from rlkit.engines.vllm.connection import Remote
from rlkit.engines.vllm.guard import HOSTS, PREFIX, Guard, secret_for, write_secret
from rlkit.engines.vllm.server_settings import ServerSettings, serve_environment


@pytest.fixture(autouse=True)
def secret(monkeypatch, tmp_path):
    monkeypatch.setenv(guard.SECRET, SECRET)
    monkeypatch.delenv(HOSTS, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def application(scope, receive, send):
    """Answers every request that comes through."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def answer(text):
    """Status that the guard around the application gives."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Guard(application)(scope_of(text), None, send))
    return sent[0].get("status", 403 if sent[0]["type"] == "websocket.close" else None)


@pytest.mark.parametrize("attack", REFUSED)
def test_attacks_are_refused(attack):
    text, status = REFUSED[attack]
    assert answer(text) == status


@pytest.mark.parametrize("good", PASSED)
def test_what_a_client_sends_is_served(good):
    assert answer(PASSED[good]) == 200


def test_a_web_server_answers_the_same():
    """All of them as bytes on sockets, through the server that vLLM uses."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("httptools")
    server = uvicorn.Server(uvicorn.Config(Guard(application), port=0, http="httptools", log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the web server")
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        assert {name: status_of(url, text) for name, (text, _) in REFUSED.items()} == {
            name: status for name, (_, status) in REFUSED.items()
        }
        assert {name: status_of(url, text) for name, text in PASSED.items()} == dict.fromkeys(PASSED, 200)
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("name", [socket.gethostname(), "node7", "NODE7.", "head.cluster"])
def test_further_names_are_those_of_the_machine_and_of_the_environment(name, monkeypatch):
    monkeypatch.setenv(HOSTS, "node7, head.cluster")
    assert answer(request("GET /health HTTP/1.1", host=f"Host: {name}:8000")) == 200
    assert answer(request("GET /health HTTP/1.1", host="Host: node8")) == 421


def test_only_the_root_path_is_taken_off():
    for path, status in (("/vllm/health", None), ("/vllm/health/x", 401), ("/other/health", 401)):
        scope = scope_of(PASSED["health"]) | {"path": unquote(path), "root_path": "/vllm"}
        assert (Guard(application).refusal(scope) or (None,))[0] == status


@pytest.mark.parametrize("value", ["", None])
def test_a_server_without_a_secret_does_not_start(value, monkeypatch):
    monkeypatch.setenv(guard.SECRET, value) if value is not None else monkeypatch.delenv(guard.SECRET)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        Guard(application)


# From the server to its clients


def test_each_server_has_a_secret_of_its_own_and_shows_it_to_nobody(monkeypatch):
    assert ServerSettings().token == SECRET  # of the environment
    monkeypatch.delenv(guard.SECRET)
    first, second = ServerSettings(), ServerSettings()
    assert first.token != second.token and len(first.token) >= 43  # 256 bits
    assert first.token not in repr(first)
    monkeypatch.setattr(server_settings, "is_cpu_build", lambda: True)  # no vLLM is needed for this
    assert serve_environment(first, {})[guard.SECRET] == first.token
    assert serve_environment(ServerSettings(host="node7"), {HOSTS: "a,b"})[HOSTS] == "a,b,node7"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token": "two words"}, "without spaces"),
        ({"token": "line\n"}, "without spaces or line ends"),
        ({"token": "schlüssel"}, "ASCII"),
        ({"token": ""}, "ASCII"),
        ({"extra": ("--api-key", "x")}, "--api-key shows the key to every user"),
        ({"extra": ("--api_key=x",)}, "Put it into VLLM_API_KEY"),
    ],
)
def test_secrets_that_cannot_be_sent_or_that_ps_would_show(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ServerSettings(**settings)


def test_the_file_of_a_secret_is_private_and_ends_with_its_server(monkeypatch):
    monkeypatch.setenv(guard.SECRET, "of-the-environment")
    before = os.umask(0)
    try:
        with scratch_folder(PREFIX) as folder:
            file = write_secret(guard.Path(folder), 8000, "of-the-file")
            assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            assert secret_for(8000) == "of-the-file"
            assert secret_for(8001) == "of-the-environment"
            with pytest.raises(FileExistsError):
                write_secret(guard.Path(folder), 8000, "again")
    finally:
        os.umask(before)
    assert secret_for(8000) == "of-the-environment"


def test_a_folder_of_another_user_is_not_believed(monkeypatch, tmp_path):
    """In /tmp everybody can make it; a link to a file of ours would send that file to a server of theirs."""
    with scratch_folder(PREFIX) as folder:
        write_secret(guard.Path(folder), 8000, "of-the-file")
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert secret_for(8000) == SECRET


def test_what_a_killed_server_left_is_not_used(tmp_path):
    folder = tmp_path / f"{guard.all_in_namespace(PREFIX)}{2**22 + 1}-x"  # beyond the largest process id
    folder.mkdir()
    write_secret(folder, 8000, "old")
    assert secret_for(8000) == SECRET
    assert not folder.exists()


def test_the_client_sends_it_to_this_machine_only_and_follows_a_restart():
    with scratch_folder(PREFIX) as folder:
        file = write_secret(guard.Path(folder), 8000, "first")
        here, elsewhere = Remote("127.0.0.1:8000", deadline=1), Remote("192.0.2.1:8000", deadline=1)
        assert here.refresh()["Authorization"] == "Bearer first"
        assert elsewhere.refresh()["Authorization"] == f"Bearer {SECRET}"  # nobody's address: not this machine's file
        assert Remote("127.0.0.1:8000", deadline=1, token="given").refresh()["Authorization"] == "Bearer given"
        file.unlink()
        write_secret(guard.Path(folder), 8000, "second")
        assert here.refresh()["Authorization"] == "Bearer second"
