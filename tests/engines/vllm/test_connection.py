"""The client of a vLLM server, against small real HTTP servers: what it refuses, and the words that a user reads."""

import resource
import signal
import socket
import threading
import time

import pytest
import torch
from builders import BOS, EOS, PAD, VOCABULARY, tiny_policy, vllm_policy
from engines.vllm.http_server import DROP, HANG, after, answering, counting
from engines.vllm.server_helpers import shared_files
from waiting import LONG, main_thread_is_in, until

import rlkit as rl
from rlkit.engine import EngineError
from rlkit.engines.vllm.connection import Remote, run_apart
from rlkit.engines.vllm.weight_transfer import choose_way
from rlkit.engines.vllm.worker_extension import shapes_of_config
from rlkit.engines.weights import is_tied, manifest, named_weights
from rlkit.support.processes import free_port
from rlkit.types import SamplingParams


def described(policy, **changes):
    """What a server of this policy says of itself."""
    shapes = {name: list(shape) for name, (shape, _) in manifest(policy).items()}
    found = {
        "protocol": 2,
        "dtype": "float32",
        "max_model_len": 64,
        "shapes": shapes,
        "tied": is_tied(policy),
        "lora_rank": None,
        "logprobs_mode": "processed_logprobs",
    }
    return found | changes


def vllm_of(policy, **changes):
    """The answers of a server that fits a policy."""
    return {
        "/health": "",
        "/version": {"version": "0.32.0"},
        "/v1/models": {"data": [{"id": "org/model"}]},
        "/weight_info": {"weight_version": "default"},
        "/metrics": counting(),
        "/collective_rpc": {"results": [described(policy, **changes)]},
    }


# Attaching


def test_nobody_there_names_host_port_seconds_and_the_command(policy):
    port = free_port()
    with pytest.raises(
        EngineError,
        match=rf"no vLLM server answered at 127.0.0.1:{port} within 2 s .*refused.* rlkit serve MODEL --port {port}",
    ):
        rl.VLLMServer(policy, url=f"http://127.0.0.1:{port}", deadline=2)


def test_a_server_that_is_still_starting_is_waited_for(policy):
    table = vllm_of(policy)
    asked = iter([(503, "loading"), (503, "loading")])
    table["/health"] = lambda: next(asked, "")
    with answering(table) as (url, calls):
        assert rl.VLLMServer(policy, url=url, deadline=LONG).max_context == 64
    assert calls[:3] == [("GET", "/health")] * 3


NO_DEV = {"/weight_info": (404, {}), "/is_sleeping": (404, {})}
OLD = {"/version": {"version": "0.11.0"}, "/weight_info": (404, {}), "/is_sleeping": {"is_sleeping": False}}


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/version": (404, "nothing here")}, r"is not a vLLM server"),
        (NO_DEV, r"vLLM 0.32.0\) runs without development mode.*rlkit serve MODEL.*VLLM_SERVER_DEV_MODE=1"),
        (OLD, r"vLLM 0.11.0 at 127.0.0.1:\d+ is too old.*pip install 'vllm>=0.32'"),
        ({"/collective_rpc": (500, "Internal Server Error")}, r"no rlkit in its workers.*--worker-extension-cls rlkit"),
        ({"/version": (401, "the secret is missing")}, r"asks for a secret.*rlkit serve says in which file"),
        ({"/v1/models": (401, {"error": "Unauthorized"})}, r"asks for a secret.*Set VLLM_API_KEY .*token="),
        ({"/health": (421, "unknown")}, r"not know itself by the name '127.0.0.1'. Start it with RLKIT_SERVE_HOSTS="),
        ({"/health": (404, "File not found")}, r"is not a vLLM server \(it has no /health\). url= is its root"),
        ({"/health": HANG}, r"no vLLM server answered at 127.0.0.1:\d+ within 0.5 s \(timed out\)"),
    ],
    ids=[
        "stranger",
        "no development mode",
        "too old",
        "no extension",
        "secret",
        "another secret",
        "name",
        "a web server",
        "hangs",
    ],
)
def test_servers_that_cannot_serve(policy, answers, message):
    deadline = 0.5 if answers.get("/health") is HANG else LONG
    with answering(vllm_of(policy) | answers) as (url, _), pytest.raises(EngineError, match=message):
        rl.VLLMServer(policy, url=url, deadline=deadline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shapes": {"model.embed_tokens.weight": [8, 4]}}, r"loaded from another model.*'org/model' at 127.0.0.1:\d+"),
        ({"dtype": "bfloat16"}, r"computes in bfloat16, the policy in float32.*rlkit serve org/model --dtype float32"),
        ({"logprobs_mode": "raw_logprobs"}, r"gives raw_logprobs, which ignore the temperature"),
        ({"protocol": 7}, r"another version.*protocol 7 there, 2 here"),
        ({"tied": True}, r"'org/model' at 127.0.0.1:\d+ ties its head.*rl.serve\(policy\)"),
    ],
    ids=["model", "dtype", "log-probabilities", "protocol", "tied"],
)
def test_servers_that_do_not_fit_the_policy(policy, changes, message):
    with answering(vllm_of(policy, **changes)) as (url, _), pytest.raises(EngineError, match=message):
        rl.VLLMServer(policy, url=url)


def test_a_server_in_the_dtype_of_autocast_fits():
    policy = tiny_policy(autocast=torch.bfloat16)
    with answering(vllm_of(policy, dtype="bfloat16")) as (url, _):
        assert rl.VLLMServer(policy, url=url).version is None


def test_a_proxy_of_the_environment_is_not_asked(policy, monkeypatch):
    with answering({}) as (proxy, asked), answering(vllm_of(policy)) as (url, _):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("http_proxy", proxy)
        rl.VLLMServer(policy, url=url)
    assert asked == []


def test_an_address_as_openai_clients_want_it_is_understood(policy):
    with answering(vllm_of(policy)) as (url, _):
        assert rl.VLLMServer(policy, url=f"{url}/v1/").remotes[0].url == url


def test_every_name_of_this_machine_is_here():
    own = socket.gethostname()
    names = ["localhost", "127.0.0.1", "127.9.9.9", "0.0.0.0", "[::1]", own]
    assert all(Remote(f"http://{name}:1", deadline=1).is_here for name in names)
    assert not Remote("http://192.0.2.1:1", deadline=1).is_here  # an address for documentation, nobody's
    assert not Remote("http://no-such-host.invalid:1", deadline=1).is_here


@pytest.mark.parametrize("url", ["", "ftp://a:1", "http://a", "http://a:x", "http://:8000"])
def test_addresses_that_are_none(policy, url):
    with pytest.raises(ValueError, match="url"):
        rl.VLLMServer(policy, url=url)


@pytest.mark.parametrize("kind", ["Qwen2MoeForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM", "BloomForCausalLM"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_server_expects_what_the_policy_gives(kind, tied):
    """From the config alone, without weights: experts under the checkpoint's names, buffers, a tied head twice."""
    import transformers

    model_class = getattr(transformers, kind)
    config = model_class.config_class(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        bos_token_id=BOS,
        pad_token_id=PAD,
        architectures=[kind],
        **({"num_experts": 4, "moe_intermediate_size": 8} if "Moe" in kind else {}),
    )
    policy = tiny_policy(model_class(config))
    expected = {name: list(shape) for name, (shape, _) in manifest(policy).items()}
    assert shapes_of_config(config) == expected
    assert len(expected) > 10


# Syncing


class Weights:
    """The weights' side of a server: answers to a sync, in a table, and the name that the weights have."""

    def __init__(self, policy, **answers):
        self.tag = "default"
        self.table = vllm_of(policy)
        loads = iter([self.table["/collective_rpc"]])
        self.table |= {
            "/weight_info": lambda: {"weight_version": self.tag},
            "/pause": {"status": "paused"},
            "/resume": {"status": "resumed"},
            "/collective_rpc": lambda: next(loads, {"results": [{"ok": True, "error": None, "mixed": False}]}),
            "/reset_prefix_cache": {"success": True},
            "/update_weight_version": {"success": True},
        } | answers


def synced(policy, url, **options):
    engine = rl.VLLMServer(policy, url=url, probe_every=0, **options)
    engine.sync(named_weights(policy), 0)
    return engine


def posts(calls):
    return [path for method, path in calls if method == "POST"][1:]  # the first asked what the server is


LOAD, NAME = ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache"], ["/update_weight_version", "/resume"]


def test_a_sync_pauses_loads_resets_names_and_resumes(policy):
    with answering(Weights(policy).table) as (url, calls):
        engine = synced(policy, url)
        assert engine.version == 0
        assert posts(calls) == [*LOAD, "/collective_rpc", *NAME]  # the first overwrites what a client before left
        calls.clear()
        engine.sync(named_weights(policy), 1)
        assert [path for _, path in calls] == [*LOAD, *NAME]
        engine.remotes[0].unclean = True
        calls.clear()
        engine.sync(named_weights(policy), 2)
        assert [path for _, path in calls] == [*LOAD, "/collective_rpc", *NAME]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"/reset_prefix_cache": {"success": False}}, "did not reset its prefix cache"),
        ({"/reset_prefix_cache": DROP}, "dropped the connection during /reset_prefix_cache"),
        ({"/update_weight_version": (500, {"error": {"message": "EngineCore died"}})}, "has died .EngineCore died"),
        ({"/pause": HANG}, r"did not answer /pause within 3 s"),
    ],
    ids=["cache", "dropped", "core", "hangs"],
)
def test_after_a_sync_that_failed_nothing_is_drawn_and_the_server_goes_on(policy, answers, message):
    with answering(Weights(policy, **answers).table) as (url, calls):
        engine = rl.VLLMServer(policy, url=url, deadline=LONG)
        engine.remotes[0].deadline = 3 if "/pause" in answers else LONG  # it is also that of the /resume that follows
        with pytest.raises(EngineError, match=message):
            engine.sync(named_weights(policy), 0)
        assert engine.version is None
        with pytest.raises(EngineError, match="cannot generate: the last transfer of weights failed"):
            engine.generate([[5]], [0], num_generations=1, params=SamplingParams(), seed=0)
        assert posts(calls)[-1] == "/resume"
        rpcs = 0 if "/pause" in answers else 2 if "/update_weight_version" in answers else 1  # load, then clear
        assert posts(calls).count("/collective_rpc") == rpcs  # nothing is sent twice


def test_shared_memory_that_is_full_says_how_much_and_what_to_do(policy):
    """A container's /dev/shm holds 64 MiB. Here a limit on files stops the write; Python ignores the signal."""
    with answering(Weights(policy).table) as (url, calls):
        engine = rl.VLLMServer(policy, url=url, probe_every=0)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        weights = sum(4 * parameter.numel() for parameter in policy.model.parameters())
        resource.setrlimit(resource.RLIMIT_FSIZE, (weights // 2, limit[1]))
        try:
            with pytest.raises(EngineError, match=r"GiB of weights to /dev/shm, which has .* GiB free.*--shm-size"):
                engine.sync(named_weights(policy), 0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert engine.version is None and posts(calls) == []
        engine.sync(named_weights(policy), 0)
        assert engine.version == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_not_sent(policy, value):
    """And the next sample does not draw from those of before as if they were the policy's."""
    weights = drawing(policy, {"choices": [choice(policy, index=place) for place in range(2)]})
    with answering(weights.table) as (url, calls):
        engine = policy.use(synced(policy, url)).engine
        weights.tag = engine._tag(0)
        rl.sample(policy, ["1"], num_generations=2, max_completion_length=4)
        calls.clear()
        with torch.no_grad():
            head = policy.model.get_output_embeddings().weight
            kept, head[1, 2] = float(head[1, 2]), value
        for _ in range(2):
            with pytest.raises(ValueError, match=r"policy weights not finite in float32: lm_head.weight \(1 of 736"):
                rl.sample(policy, ["1"], num_generations=2, max_completion_length=4)
        assert [path for _, path in calls] == []
        assert engine.version == 0 and shared_files() == []
        with torch.no_grad():
            head[1, 2] = kept
        rl.sample(policy, ["1"], num_generations=2, max_completion_length=4)
        assert [path for _, path in calls].count("/collective_rpc") == 1


def test_nan_in_a_draw_are_told_and_cleared_with_the_next_sync(policy):
    weights = drawing(policy, (400, {"error": {"message": "Out of range float values are not JSON compliant"}}))
    with answering(weights.table) as (url, calls):
        engine = synced(policy, url)
        assert not engine.remotes[0].unclean
        with pytest.raises(EngineError, match=r"log-probabilities are NaN though the weights are finite.*sample again"):
            generate(engine, weights)
        assert engine.version is None and engine.remotes[0].unclean
        calls.clear()
        engine.sync(named_weights(policy), 0)
        assert [path for _, path in calls] == [*LOAD, "/collective_rpc", *NAME]


@pytest.mark.parametrize(
    ("replaced", "name", "refused"),
    [
        ([False], "default", False),
        ([False, False], "rlkit-0a1b2c3d-4", False),  # of an adapter alone
        ([True], "default", True),  # a client that was killed before it named them
        ([False, True], "rlkit-0a1b2c3d-4", True),
        ([False], "step-7", True),  # another program's
    ],
)
def test_an_adapter_alone_wants_the_base_weights_of_the_start(replaced, name, refused):
    peft = pytest.importorskip("peft")
    policy = vllm_policy(peft_config=peft.LoraConfig(r=4, target_modules=["q_proj"]))
    table = vllm_of(policy, lora_rank=8) | {"/weight_info": {"weight_version": name}}
    rpcs = iter([table["/collective_rpc"]])
    table["/collective_rpc"] = lambda: next(rpcs, {"results": [{"replaced": one} for one in replaced]})
    with answering(table) as (url, _):
        if refused:
            with pytest.raises(EngineError, match=rf"has taken full or merged weights .*'{name}'.*Start the server ag"):
                rl.VLLMServer(policy, url=url, lora="adapter")
        else:
            engine = rl.VLLMServer(policy, url=url, lora="adapter")
            table["/collective_rpc"] = {"results": [{"replaced": True}]}  # another client since then
            with pytest.raises(EngineError, match="has taken full or merged weights"):
                engine.sync(named_weights(policy), 0)
            assert engine.version is None and shared_files() == []


@pytest.mark.parametrize(
    ("sync", "urls", "folder", "expected"),
    [
        ("auto", "127.0.0.1:1", None, "shm"),
        ("auto", "127.0.0.1:1", "/shared", "disk"),
        ("auto", "http://node7:1", "/shared", "disk"),
        ("auto", "http://node7:1", None, "no way to transfer weights to node7:1"),
        ("shm", "127.0.0.1:1,node7:1", None, "but node7:1 is not"),
        ("disk", "127.0.0.1:1", None, "needs folder="),
        ("tape", "127.0.0.1:1", None, "must be one of auto, shm, disk, nccl"),
    ],
)
def test_ways_of_the_weights(sync, urls, folder, expected):
    remotes = [Remote(url, deadline=1) for url in urls.split(",")]
    if " " in expected or "=" in expected:
        with pytest.raises(ValueError, match=expected):
            choose_way(remotes, sync, folder)
    else:
        assert choose_way(remotes, sync, folder) == expected


# Drawing


def choice(policy, tokens=(5, EOS), reason="stop", index=0):
    return {
        "index": index,
        "token_ids": list(tokens),
        "logprobs": {"token_logprobs": [-1.0] * len(tokens)},
        "finish_reason": reason,
    }


def drawing(policy, completions, **answers):
    """A server whose weights are always the engine's, and what it answers to a request for completions."""
    weights = Weights(policy, **{"/v1/completions": completions}, **answers)
    return weights


def generate(engine, weights, **options):
    weights.tag = engine._tag(0)
    return engine.generate(
        [[5, 6]], [0], num_generations=2, params=SamplingParams(max_completion_length=4), seed=0, **options
    )


def test_completions_come_in_their_order(policy):
    answer = {"choices": [choice(policy, (7, EOS), index=1), choice(policy, (6, 6, 6, 6), "length")]}
    weights = drawing(policy, answer)
    with answering(weights.table) as (url, _):
        [group] = generate(synced(policy, url), weights)
    assert [(c.token_ids, c.finish_reason, c.version) for c in group] == [
        ([6, 6, 6, 6], "length", 0),
        ([7, EOS], "eos", 0),
    ]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda p: {"choices": [choice(p), choice(p, reason="abort", index=1)]}, r"ended with 'abort'"),
        (lambda p: {"choices": [choice(p)]}, r"1 completions came for a prompt, 2 were asked for"),
        (lambda p: {"choices": [choice(p) | {"prompt_token_ids": [1, 5, 6]}, choice(p, index=1)]}, r"changes prompts"),
        (lambda p: (404, {"error": {"message": "The model `x` does not exist."}}), r"with 404: The model `x` does not"),
        (lambda p: (500, {"error": {"message": "EngineCore encountered an issue."}}), r"has died .*start the server"),
        (lambda p: (400, {"error": {"message": "temperature must be"}}), r"with 400: temperature must be"),
        (lambda p: DROP, r"dropped the connection during /v1/completions.*start it again"),
    ],
    ids=["abort", "count", "prompt", "model", "core", "setting", "dropped"],
)
def test_answers_that_are_no_completions(policy, answer, message):
    weights = drawing(policy, answer(policy))
    with answering(weights.table) as (url, calls):
        engine = synced(policy, url)
        with pytest.raises(EngineError, match=message):
            generate(engine, weights)
    assert [path for _, path in calls].count("/v1/completions") == 1  # never asked twice


@pytest.mark.integration
def test_silence_is_an_error_and_slowness_is_not(policy):
    """Slow is what comes after many looks at the counters, of which each sees a token more."""
    whole, looks = {"choices": [choice(policy), choice(policy, index=1)]}, []

    def tokens():
        looks.append(time.monotonic())
        return f'vllm:generation_tokens_total{{engine="0"}} {len(looks)}\n'

    slow = drawing(policy, after(lambda: looks and looks[-1] - looks[0] > 3, whole), **{"/metrics": tokens})
    with answering(slow.table) as (url, _):
        engine = synced(policy, url, deadline=LONG)
        engine.remotes[0].deadline = 3
        assert len(generate(engine, slow)[0]) == 2
    still = drawing(policy, HANG, **{"/metrics": 'vllm:generation_tokens_total{engine="0"} 5\n'})
    with answering(still.table) as (url, _):
        engine = synced(policy, url, deadline=LONG)
        engine.remotes[0].deadline = 1
        with pytest.raises(EngineError, match=r"127.0.0.1:\d+ drew no token for 1 s. It hangs.*larger deadline="):
            generate(engine, still)


def test_a_server_that_was_started_again_gets_the_weights_again(policy, caplog):
    weights = drawing(policy, {"choices": [choice(policy), choice(policy, index=1)]})
    with answering(weights.table) as (url, calls):
        engine = synced(policy, url)
        tags = iter(["default"])
        mine = engine._tag(0)
        weights.table["/weight_info"] = lambda: {"weight_version": next(tags, mine)}
        generate(engine, weights)
        assert posts(calls).count("/collective_rpc") == 3  # a load, a clearing, a load
        assert "was started again" in caplog.text
        weights.table["/weight_info"] = {"weight_version": "rlkit-other-3"}
        with pytest.raises(EngineError, match=r"another client has put its weights \('rlkit-other-3'\)"):
            generate(engine, weights)
        assert engine.version is None


def test_a_closed_engine_says_so(policy):
    weights = Weights(policy)
    with answering(weights.table) as (url, _):
        engine = synced(policy, url)
        engine.close()
        engine.close()
        for use in (engine.check, lambda: engine.sync([], 1)):
            with pytest.raises(EngineError, match=r"is closed. Make a new one"):
                use()


@pytest.mark.parametrize("moment", ["at its start", "later"])
def test_an_interrupt_ends_the_coroutine_in_the_other_thread(sigint_guard, moment):
    import asyncio

    ended = threading.Event()
    main = threading.main_thread().ident

    async def wait():
        try:
            if moment == "later":
                await asyncio.to_thread(until, lambda: main_thread_is_in("run_apart"), "the wait for it")
            signal.pthread_kill(main, signal.SIGINT)
            await asyncio.sleep(600)
        finally:
            ended.set()

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run_apart(wait)
    assert ended.is_set()
