"""Completions from vLLM servers: one request for each prompt, all sent at once, so that vLLM batches them.

A request has no time limit, since long completions of large batches take long. Instead each server's token counters are
polled while requests are open, and a server whose counters do not change for the length of the deadline is given up.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlkit.engine import Completion, EngineError
from rlkit.engines.vllm.connection import KEEP, run_apart
from rlkit.engines.vllm.handshake import Described
from rlkit.engines.vllm.sampling_requests import REGEX_HINT, NotFiniteError, completion_of

if TYPE_CHECKING:
    from rlkit.policy import Policy

OPEN_REQUESTS = 256
"""Most open requests of this process; each needs a file descriptor on both sides."""
TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


def draw(
    policy: "Policy",
    servers: Sequence[Described],
    shares: Sequence[int],
    prompts: Sequence[Sequence[int]],
    requests: Sequence[dict[str, Any]],
    *,
    version: int,
    model: str | None = None,
) -> list[list[Completion]]:
    """Completions for each prompt, from the server at its index in `shares` with its settings of `vllm_request`.

    `version` is that of the servers' weights; `model` names an adapter on the servers, None the model itself. After an
    `EngineError` (a server dies, hangs, refuses, cuts a completion off, draws NaN) the other requests are dropped.
    """
    jobs = list(zip((servers[share] for share in shares), prompts, requests, strict=True))
    try:
        answers = run_apart(lambda: _draw_all(servers, jobs, model))
        return [
            _read(policy, server, prompt, settings["n"], answer, version)
            for (server, prompt, settings), answer in zip(jobs, answers, strict=True)
        ]
    except NotFiniteError:
        for server in servers:
            server.remote.unclean = True
        raise


async def _draw_all(
    servers: Sequence[Described], jobs: Sequence[tuple[Described, Sequence[int], dict[str, Any]]], model: str | None
) -> list[Any]:
    import httpx

    limits = httpx.Limits(max_connections=OPEN_REQUESTS, max_keepalive_connections=0)
    verify = any(server.remote.verify for server in servers)
    async with httpx.AsyncClient(trust_env=False, limits=limits, timeout=None, verify=verify) as client:
        heard = {server.remote.url: time.monotonic() for server in servers}
        wanted = [asyncio.ensure_future(_draw_one(client, *job, model, heard)) for job in jobs]
        watches = [asyncio.ensure_future(_watch(server, heard)) for server in servers]
        tasks = {*wanted, *watches}
        try:
            while not all(task.done() for task in wanted):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                tasks -= done
                for task in done:
                    task.result()  # the first error ends all
            return [task.result() for task in wanted]
        finally:
            for task in (*wanted, *watches):
                task.cancel()
            await asyncio.gather(*wanted, *watches, return_exceptions=True)


async def _draw_one(
    client: Any,
    server: Described,
    prompt: Sequence[int],
    settings: dict[str, Any],
    model: str | None,
    heard: dict[str, float],
) -> Any:
    remote, path = server.remote, "/v1/completions"
    body = {
        "model": model or server.model,
        "prompt": list(prompt),
        "return_token_ids": True,
        "add_special_tokens": False,
        **settings,
    }
    with remote.translated(path, remote.deadline):
        answer = await client.post(remote.url + path, json=body, headers=remote.headers)
    heard[remote.url] = time.monotonic()
    try:
        return remote.read(answer, path)
    except EngineError as error:
        if "JSON compliant" in str(error):  # NaN, which vLLM 0.32 cannot write; status 400
            raise NotFiniteError(f"VLLMServer ({remote.where})") from error
        if answer.status_code in (400, 500) and "structured_outputs" in settings:
            raise EngineError(f"{error}. {REGEX_HINT}") from error
        raise


async def _watch(server: Described, heard: dict[str, float]) -> None:
    """Raise when a server has drawn no token for the length of its deadline."""
    import httpx

    remote = server.remote
    count = -1.0
    async with httpx.AsyncClient(trust_env=False, timeout=remote.deadline, verify=remote.verify) as client:
        while True:
            await asyncio.sleep(min(2.0, remote.deadline / 4))
            left = heard[remote.url] + remote.deadline - time.monotonic()
            if left <= 0:
                raise EngineError(
                    f"VLLMServer: {remote.where} drew no token for {remote.deadline:g} s. It hangs, is stopped or is "
                    f"paused. {KEEP}: look at the server's log, and call sample again once it works, or start it "
                    "again. A larger deadline= waits longer."
                )
            with remote.translated("/metrics", remote.deadline):
                try:
                    answer = await client.get(f"{remote.url}/metrics", headers=remote.headers, timeout=left)
                except httpx.ReadTimeout:
                    continue  # the message above says more
            now = sum(float(value) for value in TOKENS.findall(answer.text))
            if now != count:
                count, heard[remote.url] = now, time.monotonic()


def _read(
    policy: "Policy", server: Described, prompt: Sequence[int], count: int, answer: Any, version: int
) -> list[Completion]:
    where = f"VLLMServer ({server.remote.where})"
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != count:
        raise EngineError(f"{where}: {len(choices)} completions came for a prompt, {count} were asked for.")
    for choice in choices:
        seen = choice.get("prompt_token_ids")
        if seen is not None and list(seen) != list(prompt):
            raise EngineError(
                f"{where}: the server read the prompt as {seen[:8]}..., {list(prompt)[:8]}... was sent: it changes "
                "prompts. Start it with rlkit serve."
            )
    return [
        completion_of(
            policy,
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            choice["finish_reason"],
            version=version,
            where=where,
        )
        for choice in choices
    ]
