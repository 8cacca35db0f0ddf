"""The checks of a vLLM server before a client uses it; each refusal says what to do."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlkit.engine import EngineError
from rlkit.engines.vllm.connection import Remote
from rlkit.engines.weights import Manifest, check_manifest, is_tied

if TYPE_CHECKING:
    from rlkit.policy import Policy

TESTED = "0.32"
PROTOCOL = 2
FRESH = "default"  # vLLM's own name for the weights of a server that has just been started


@dataclass(frozen=True)
class Described:
    """A server's description of itself.

    Attributes:
        remote: its address.
        model: model name for requests.
        source: folder or hub id that it has loaded, for messages.
        dtype: of its weights.
        max_model_len: most tokens of prompt and completion together.
        shapes: shape of each weight by name; None if unknown.
        tied: head and embedding are one parameter.
        lora_rank: largest rank of an adapter; None without adapters.
        logprobs_mode: vLLM's setting of that name.
    """

    remote: Remote
    model: str
    source: str
    dtype: str
    max_model_len: int
    shapes: dict[str, list[int]] | None
    tied: bool
    lora_rank: int | None
    logprobs_mode: str


def attach(remote: Remote) -> Described:
    """Wait for a server and ask for its description; `EngineError` for one that cannot take weights."""
    remote.wait_until_up()
    how = "Start it with: rlkit serve MODEL"
    if remote.status("/version") not in (200, 401):  # 401: the call below says what to do
        raise EngineError(f"VLLMServer: what answers at {remote.where} is not a vLLM server. {how}, or give its url=.")
    release = str(remote.call("GET", "/version").get("version"))
    models = remote.call("GET", "/v1/models")["data"]
    if remote.status("/weight_info") == 404:
        if remote.status("/is_sleeping") == 404:
            raise EngineError(
                f"VLLMServer: the server at {remote.where} (vLLM {release}) runs without development mode, so it has "
                f"no endpoints for weights. {how}, or set VLLM_SERVER_DEV_MODE=1 for it."
            )
        raise EngineError(
            f"VLLMServer: vLLM {release} at {remote.where} is too old: it cannot tell which weights it has "
            f"(/weight_info). rlkit was tested with vLLM {TESTED}: pip install 'vllm>={TESTED}'."
        )
    try:
        found: dict[str, Any] = remote.call("POST", "/collective_rpc", body={"method": "rlkit_describe"})["results"][0]
    except EngineError as error:
        raise EngineError(
            f"VLLMServer: the server at {remote.where} has no rlkit in its workers ({error}). {how}, or add "
            "--worker-extension-cls rlkit.engines.worker.WeightLoader to its command, with rlkit installed there."
        ) from error
    if found["protocol"] != PROTOCOL:
        raise EngineError(
            f"VLLMServer: the rlkit of the server at {remote.where} is another version than this one (protocol "
            f"{found['protocol']} there, {PROTOCOL} here). Install the same rlkit on both sides."
        )
    return Described(
        remote=remote,
        model=models[0]["id"],
        source=models[0].get("root") or models[0]["id"],
        dtype=found["dtype"],
        max_model_len=int(found["max_model_len"]),
        shapes=found["shapes"],
        tied=found["tied"],
        lora_rank=found["lora_rank"],
        logprobs_mode=found["logprobs_mode"],
    )


def check_fit(server: Described, policy: "Policy", ours: Manifest) -> None:
    """Raise `EngineError` for a server of another model or dtype, or whose log-probabilities ignore the temperature."""
    where = server.remote.where
    if server.shapes is not None and ours:  # quantised weights have other shapes
        try:
            check_manifest(ours, {name: (tuple(s), None) for name, s in server.shapes.items()}, "VLLMServer")
        except ValueError as error:
            raise EngineError(f"{error} It is {server.source!r} at {where}; the policy is {policy.name!r}.") from error
    if server.tied and not is_tied(policy):
        raise EngineError(
            f"VLLMServer: {server.source!r} at {where} ties its head to the embedding, the policy {policy.name!r} has "
            "a separate head, which the server cannot hold. Serve the policy itself: rl.serve(policy)."
        )
    own: torch.dtype = next(p.dtype for p in policy.model.parameters() if p.is_floating_point())
    fitting = {str(dtype).removeprefix("torch.") for dtype in (own, policy.autocast) if dtype is not None}
    if server.dtype not in fitting:
        raise EngineError(
            f"VLLMServer: the server at {where} computes in {server.dtype}, the policy in "
            f"{' or '.join(sorted(fitting))}, so its tokens would come from other numbers. Start it with: rlkit serve "
            f"{server.source} --dtype {sorted(fitting)[0]}."
        )
    if server.logprobs_mode != "processed_logprobs":
        raise EngineError(
            f"VLLMServer: the server at {where} gives {server.logprobs_mode}, which ignore the temperature. Start it "
            "with rlkit serve, or with --logprobs-mode processed_logprobs."
        )
