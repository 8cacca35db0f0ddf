"""A real vLLM server, used and abused: every fault ends in a message, and nothing hangs or stays behind.

Three servers are started in the whole file, since each takes half a minute.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import builders
import pytest
import torch
from builders import tiny_policy

pytest.importorskip("vllm", reason="no vLLM here: make test-vllm")

from builders import SIZE, vllm_model, vllm_policy
from engines.contract import WeightsContract
from engines.sampling_helpers import groups_of
from engines.vllm.attacks import PASSED, REFUSED, status_of
from engines.vllm.server_helpers import (
    CONTEXT,
    LONG_PROMPT,
    PROMPTS,
    api_server,
    engine_core,
    family,
    named,
    raw,
    running_requests,
    sampler_gap,
    shared_files,
    stopped,
    train,
    two_steps,
)
from waiting import LONG, alive, interrupt_when, until

import rlkit as rl
from rlkit.engine import EngineError
from rlkit.engines.vllm.connection import Remote
from rlkit.engines.vllm.guard import secret_for
from rlkit.engines.vllm.weight_transfer import finish, trl_client
from rlkit.engines.weights import named_weights
from rlkit.support.processes import free_port

pytestmark = pytest.mark.vllm

SMOLLM2_GAP = 5e-4  # nats, float32, 30 layers
GAP = 1e-4  # nats, float32: the bound on the difference between engine and trainer
CLIENT = str(Path(__file__).with_name("client_program.py"))
LORA_RANK = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's checkpoint."""
    path = tmp_path_factory.mktemp("served") / "tied"
    vllm_policy().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def server():
    """Of a policy in memory, whose configuration names no architecture."""
    with rl.serve(vllm_policy(), max_model_len=CONTEXT, lora_rank=LORA_RANK) as server:
        yield server


@pytest.fixture
def policy(server):
    """A policy that samples with the server."""
    policy = vllm_policy()
    engine = rl.VLLMServer(policy, url=server.url)
    yield policy.use(engine)
    engine.close()


def draw(policy, prompts=PROMPTS, **settings):
    return builders.draw(policy, prompts, **({"seed": 5, "num_generations": 2, "max_completion_length": 8} | settings))


def step(policy, rollout):
    """One large optimizer step."""
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    rl.loss_step(policy, optimizer, rollout, torch.linspace(-1, 1, len(rollout)), max_grad_norm=1.0)


# The server as it was started


def test_an_adapter_alone_lies_on_the_weights_of_the_start_only(server):
    """It comes first: after any full or merged weights, a killed client's too, adapters alone are refused."""
    policy = with_adapter(server, "adapter")
    first = draw(policy)
    assert sampler_gap(policy, first) < GAP
    step(policy, first)
    second = draw(policy)
    assert sampler_gap(policy, second) < GAP and groups_of(first) != groups_of(second)
    with_adapter(server, "adapter").engine.close()  # another trainer with an adapter alone changes no base weights

    other = vllm_policy(seed=9)
    draw(other.use(rl.VLLMServer(other, url=server.url)))
    with pytest.raises(EngineError, match="another client has put its weights"):
        draw(policy)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"has taken full or merged weights .*Start the server again"):
            draw(policy)
    policy.engine.close()
    with pytest.raises(EngineError, match=r"has taken full or merged weights .*lora='merge'"):
        with_adapter(server, "adapter")
    assert sampler_gap(policy, draw(policy.use(rl.VLLMServer(policy, url=server.url)))) < GAP
    policy.engine.close()
    assert shared_files() == []


def test_attacks_are_refused(server, policy):
    """A page in a browser, another program, another user: what vLLM alone obeys."""
    before = groups_of(draw(policy))
    secret = secret_for(urlsplit(server.url).port)
    assert secret not in server.log.read_text() and secret not in repr(server)
    answers = {name: status_of(server.url, text, secret=secret) for name, (text, _) in REFUSED.items()}
    assert answers == {name: status for name, (_, status) in REFUSED.items()}
    assert {status_of(server.url, text, secret=secret) for text in PASSED.values()} == {200}
    assert groups_of(draw(policy)) == before
    words = [word for process in family(server.process.pid) for word in process.cmdline()]
    assert words and not any(secret in word for word in words)  # what ps shows to everybody


def test_a_client_without_the_secret_says_what_to_do(server, monkeypatch):
    monkeypatch.setattr("rlkit.engines.vllm.connection.secret_for", lambda port: "of another server")
    with pytest.raises(EngineError, match=r"asks for a secret.*Set VLLM_API_KEY"):
        rl.VLLMServer(vllm_policy(), url=server.url)


def test_weights_that_are_not_finite_never_get_there(server, policy):
    before = groups_of(draw(policy))
    weight = policy.model.model.layers[0].mlp.up_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 4] = torch.nan
    for _ in range(2):
        with pytest.raises(ValueError, match=r"not finite in float32: model.layers.0.mlp.up_proj.weight \(1 of"):
            draw(policy)
    with torch.no_grad():
        weight.copy_(kept)
    assert groups_of(draw(policy)) == before


def test_nan_that_a_server_drew_with_do_not_stay(server, policy, monkeypatch):
    """As if numbers in between had overflowed; then for the same trainer, and for a new one after it was killed."""
    before = groups_of(draw(policy))
    weight = policy.model.model.layers[0].mlp.up_proj.weight
    kept = weight.detach().clone()
    for _ in range(2):
        monkeypatch.setattr("rlkit.engines.vllm.weight_transfer.finite", lambda weights, where, dtype: weights)
        policy.engine.probe = None
        with torch.no_grad():
            weight.fill_(torch.nan)
        with pytest.raises(EngineError, match="log-probabilities are NaN"):
            draw(policy)
        monkeypatch.undo()
        with torch.no_grad():
            weight.copy_(kept)
        assert groups_of(draw(policy)) == before
        with torch.no_grad():
            weight.fill_(torch.nan)
        monkeypatch.setattr("rlkit.engines.vllm.weight_transfer.finite", lambda weights, where, dtype: weights)
        with pytest.raises(EngineError, match="log-probabilities are NaN"):
            draw(policy)
        monkeypatch.undo()
        with torch.no_grad():
            weight.copy_(kept)
        policy.use(rl.VLLMServer(policy, url=server.url))
        assert groups_of(draw(policy)) == before


# What it is for


def test_every_step_samples_from_the_weights_of_that_step(policy):
    trace = train(policy, 6)
    assert max(gap for _, _, gap in trace) < GAP
    assert (policy.version, policy.engine.version) == (6, 5)
    assert len({str(tokens) for tokens, _, _ in trace}) == 6  # the policy moves


def test_greedy_tokens_are_those_of_the_transformers_engine_also_after_steps(policy):
    """The likeliest token needs no seed, so two engines must agree on each (vLLM on a CPU may keep a stale head)."""
    for _ in range(2):
        served = draw(policy, top_k=1, max_completion_length=16)
        own = rl.sample(
            rl.TransformersEngine(policy), PROMPTS, num_generations=2, max_completion_length=16, seed=0, top_k=1
        )
        assert groups_of(served) == groups_of(own)
        step(policy, draw(policy))


def test_a_long_prompt_is_not_answered_from_the_cache_of_older_weights(policy):
    """Two whole blocks of vLLM's prefix cache fit into the prompt: values of older weights would be reused."""
    for _ in range(3):
        rollout = draw(policy, [LONG_PROMPT])
        assert sampler_gap(policy, rollout) < GAP
        step(policy, rollout)


def test_a_prompt_gets_the_same_completions_alone_and_in_company(policy):
    together = groups_of(draw(policy))
    batch = rl.make_batch(policy, PROMPTS)
    for place, prompt in enumerate(PROMPTS):
        alone = rl.make_batch(policy, [prompt])
        alone.group_id[:] = batch.group_id[place]
        assert groups_of(draw(policy, alone)) == {place: together[place]}
    assert groups_of(draw(policy, seed=6)) != together


def test_the_trainers_random_state_is_left_alone(policy):
    draw(policy)  # the first sync
    before = torch.random.get_rng_state()
    draw(policy)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.filterwarnings("ignore:sample. top_p, top_k:UserWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_p": 0.7},
        {"top_k": 5},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"regex": "[0-9]{2,4}"},
        {"stop_strings": ("1", "a")},
        {"min_completion_length": 6},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_reach_the_server_and_log_probabilities_stay_the_policys(policy, settings):
    rollout = draw(policy, num_generations=8, **settings)
    assert groups_of(rollout) != groups_of(draw(policy, num_generations=8))
    assert sampler_gap(policy, rollout) < GAP
    if "regex" in settings:
        assert all(text.isdecimal() and 2 <= len(text) <= 4 for text in rollout.completions)
    if "min_completion_length" in settings:
        assert min(rollout.lengths.tolist()) >= 6
    if "stop_strings" in settings:
        assert any(text.endswith("1") for text in rollout.completions)
        assert not any("1" in text[:-1] or "a" in text[:-1] for text in rollout.completions)


def test_a_regex_and_stop_strings_that_the_server_does_not_take(policy):
    before = groups_of(draw(policy))
    with pytest.raises(EngineError, match=r"/v1/completions with 400.*With regex=: vLLM's grammar"):
        draw(policy, regex="([")
    with pytest.raises(ValueError, match="takes up to 4 stop strings, got 5"):
        draw(policy, stop_strings=tuple("12345"))
    assert groups_of(draw(policy)) == before


def test_weights_that_were_changed_by_hand_go_over_too(policy):
    draw(policy)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    assert sampler_gap(policy, draw(policy)) < GAP


def test_trls_client_asks_no_proxy_and_sends_nothing_twice(server, monkeypatch):
    """Up to the GPU that it then needs: it is only for NCCL."""
    pytest.importorskip("trl")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    client = trl_client(Remote(server.url, deadline=30), 51216)
    assert client.model == "policy" and client.get_world_size() == 1
    assert client.session.get_adapter(server.url).max_retries.total == 0


def test_weights_go_over_a_disk_too(server, tmp_path):
    policy = vllm_policy(seed=1)
    policy.use(rl.VLLMServer(policy, url=server.url, sync="disk", folder=tmp_path / "weights"))
    assert sampler_gap(policy, draw(policy)) < GAP
    assert list((tmp_path / "weights").iterdir()) == []


def test_several_servers_share_the_prompts_and_all_get_the_weights(server, policy):
    """One server under two names: both are given weights, half of the prompts go to each."""
    port = server.url.rsplit(":", 1)[1]
    one = groups_of(draw(policy))
    policy.use(rl.VLLMServer(policy, url=f"http://127.0.0.1:{port},http://localhost:{port}"))
    assert groups_of(draw(policy)) == one


@pytest.fixture(scope="module")
def subject(server):
    """The engine of the contract."""
    return rl.VLLMServer(vllm_policy(), url=server.url, probe_every=1)


class TestServer(WeightsContract):
    def break_a_transfer(self, subject):
        def half():
            yield from list(named_weights(subject.policy))[:9]
            raise OSError("the stream ends here")

        with pytest.raises(OSError, match="the stream ends here"):
            subject.sync(half(), subject.policy.version)


def test_server_and_colocate_give_identical_tokens_and_rewards(server):
    served, colocated = vllm_policy(), vllm_policy()
    served.use(rl.VLLMServer(served, url=server.url))
    trace = train(served, 6)
    engine = rl.VLLMColocate(colocated, max_model_length=CONTEXT, max_num_seqs=32)
    try:
        other = train(colocated.use(engine), 6)
    finally:
        engine.close()
    assert [step[:2] for step in trace] == [step[:2] for step in other]
    assert max(gap for *_, gap in trace + other) < GAP


# Faults of a transfer that only the probe sees


def old_layer(weights):
    old = {name: tensor.clone() for name, tensor in weights if "layers.1.mlp" in name}
    return lambda stream: [(name, old.get(name, tensor)) for name, tensor in stream]


def all_old(weights):
    old = [(name, tensor.clone()) for name, tensor in weights]
    return lambda stream: old


@pytest.mark.parametrize(
    ("fault", "message"),
    [(old_layer, "some weights did not arrive"), (all_old, "stale weights.*version 0")],
)
def test_the_probe_catches_weights_of_one_step_before(server, fault, message, monkeypatch):
    policy = vllm_policy()
    engine = policy.use(rl.VLLMServer(policy, url=server.url, probe_every=1)).engine
    rollout = draw(policy)
    change, send = fault(named_weights(policy)), engine.handover.send
    step(policy, rollout)
    monkeypatch.setattr(engine.handover, "send", lambda stream, tag: send(change(stream), tag))
    with pytest.raises(rl.engines.ProbeError, match=message):
        draw(policy)
    assert engine.version is None
    monkeypatch.undo()
    assert sampler_gap(policy, draw(policy)) < GAP


def test_the_probe_catches_a_tied_head_that_was_forgotten(server, monkeypatch, tmp_path):
    """vLLM's own reload of a saved checkpoint, which names a tied weight once: the packed head stays."""
    policy = vllm_policy()
    engine = policy.use(rl.VLLMServer(policy, url=server.url, probe_every=1)).engine
    step(policy, draw(policy))
    remote = engine.remotes[0]

    def reload_checkpoint(stream, tag):
        policy.save_pretrained(tmp_path)
        remote.call(
            "POST", "/collective_rpc", body={"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
        )
        finish(remote, tag)

    monkeypatch.setattr(engine.handover, "send", reload_checkpoint)
    with pytest.raises(rl.engines.ProbeError, match="stale head"):
        draw(policy)
    monkeypatch.undo()
    assert sampler_gap(policy, draw(policy)) < GAP


def test_the_probe_catches_a_cache_that_was_not_reset(server, monkeypatch):
    policy = vllm_policy()
    engine = policy.use(rl.VLLMServer(policy, url=server.url, probe_every=1)).engine
    rollout = draw(policy)
    step(policy, rollout)

    def finish_without_reset(remote, tag):
        remote.call("POST", "/update_weight_version", body={"new_version": tag})

    monkeypatch.setattr("rlkit.engines.vllm.weight_transfer.finish", finish_without_reset)
    monkeypatch.setattr(
        "rlkit.engines.vllm.connection.Remote.paused", contextlib.nullcontext
    )  # vLLM's pause resets it too
    with pytest.raises(rl.engines.ProbeError, match="stale prefix cache"):
        draw(policy)
    monkeypatch.undo()
    assert sampler_gap(policy, draw(policy)) < GAP
    assert engine.probe.gap_max < GAP


# LoRA


def with_adapter(server, way, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=LORA_RANK, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    policy = vllm_policy()
    policy = rl.load_policy(policy.model, tokenizer=policy.tokenizer, peft_config=config, device="cpu")
    return policy.use(rl.VLLMServer(policy, url=server.url, lora=way))


def test_an_adapter_goes_over_merged(server):
    base = vllm_policy()
    policy = with_adapter(server, "merge")
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    first = draw(policy)
    assert sampler_gap(policy, first) < GAP
    assert groups_of(first) != groups_of(draw(base.use(rl.TransformersEngine(base))))
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.model.state_dict().items())
    step(policy, first)
    assert sampler_gap(policy, draw(policy)) < GAP
    policy.engine.close()
    assert shared_files() == []


def test_an_adapter_beyond_the_servers_rank_is_refused(server):
    peft = pytest.importorskip("peft")
    policy = vllm_policy()
    config = peft.LoraConfig(r=2 * LORA_RANK, target_modules=["q_proj"])
    policy = rl.load_policy(policy.model, tokenizer=policy.tokenizer, peft_config=config, device="cpu")
    with pytest.raises(EngineError, match=rf"adapters up to rank {LORA_RANK}.*rank 16.*--lora-rank 16"):
        rl.VLLMServer(policy, url=server.url, lora="adapter")


# What is refused, with the server as it was before


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            lambda: vllm_policy(vocab_size=SIZE + 8),
            r"shapes differ \(model.embed_tokens.weight: policy \(54, 64\), engine \(46, 64",
        ),
        (lambda: rl.load_policy("tiny-add", device="cpu"), r"another model than the policy"),
        (
            lambda: tiny_policy(vllm_model().bfloat16()),
            r"computes in float32, the",
        ),
        (lambda: vllm_policy(tied=False), r"ties its head to the embedding.*Serve the policy itself"),
    ],
    ids=["width", "model", "dtype", "untied"],
)
def test_another_model_is_refused_at_once(server, policy, other, expected):
    before = groups_of(draw(policy))
    with pytest.raises(EngineError, match=expected):
        rl.VLLMServer(other(), url=server.url)
    assert groups_of(draw(policy)) == before


def test_a_bad_sync_is_refused_and_the_engine_is_as_it_was(policy):
    before = groups_of(draw(policy))
    weights = [(name, tensor.clone()) for name, tensor in named_weights(policy)]
    without_head = [pair for pair in weights if pair[0] != "lm_head.weight"]
    narrow = [(name, tensor[..., :-1]) for name, tensor in weights]
    for bad, reason in ((without_head, "lm_head.weight"), (narrow, "shapes differ"), ([], "lacks")):
        with pytest.raises(ValueError, match=reason):
            policy.engine.sync(bad, 1)
    assert policy.engine.version == 0
    assert groups_of(draw(policy)) == before


def test_weights_that_cannot_be_read_do_not_end_the_server(server, policy, tmp_path):
    before = groups_of(draw(policy))
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    for name, reason in (("cut.safetensors", "Error"), ("missing.safetensors", "sees no file")):
        answer = raw(server.url, "POST", "/collective_rpc", {"method": "rlkit_load", "args": [str(tmp_path / name)]})[
            "results"
        ][0]
        assert answer["ok"] is False and answer["mixed"] is False and reason in answer["error"]
    assert groups_of(draw(policy)) == before


def test_a_reload_that_another_client_broke_off_is_mended_by_the_next_sync(server, policy):
    """vLLM's own reload of a folder that is not there leaves layers without storage."""
    before = groups_of(draw(policy))
    with pytest.raises(OSError, match="500"):
        raw(server.url, "POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}})
    policy.engine.sync(named_weights(policy), 0)
    assert groups_of(draw(policy)) == before


def test_weights_of_another_client_are_noticed(server, policy):
    mine = groups_of(draw(policy))
    other = vllm_policy(seed=9)
    draw(other.use(rl.VLLMServer(other, url=server.url)))
    with pytest.raises(EngineError, match="another client has put its weights"):
        draw(policy)
    assert groups_of(draw(policy)) == mine  # and taken back, as the message says


def test_aborted_completions_are_no_completions(server, policy):
    before = groups_of(draw(policy))
    raised = []

    def long_draw():
        try:
            draw(policy, num_generations=32, max_completion_length=300, min_completion_length=300)
        except EngineError as error:
            raised.append(str(error))

    thread = threading.Thread(target=long_draw)
    thread.start()
    until(lambda: running_requests(server.url), "requests")
    raw(server.url, "POST", "/pause?mode=abort")
    thread.join()
    raw(server.url, "POST", "/resume")
    assert raised and "abort" in raised[0]
    assert groups_of(draw(policy)) == before


# Faults around it


def test_a_proxy_of_the_environment_is_not_used(server, policy, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    policy.use(rl.VLLMServer(policy, url=server.url))
    assert sampler_gap(policy, draw(policy)) < GAP


def test_an_interrupt_drops_the_requests_and_the_next_call_works(server, policy, sigint_guard):
    before = groups_of(draw(policy))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    thread = interrupt_when(lambda: running_requests(server.url))
    with pytest.raises(KeyboardInterrupt):
        draw(policy, num_generations=32, max_completion_length=300, min_completion_length=300)
    thread.join()
    until(lambda: running_requests(server.url) == 0, "vLLM to drop the requests")
    assert groups_of(draw(policy)) == before


def test_a_client_that_was_killed_is_replaced_by_the_next_one(server, policy, folder):
    """Killed while it trains, and as if killed between pause and resume."""
    with subprocess.Popen([sys.executable, CLIENT, "forever", server.url, folder], stdout=subprocess.PIPE) as client:
        assert client.stdout.readline() == b"step\n"
        client.kill()
    raw(server.url, "POST", "/pause?mode=wait")
    assert sampler_gap(policy, draw(policy)) < GAP
    assert train(policy, 1)[0][2] < GAP


def test_a_server_that_stands_still_is_an_error_or_a_wait(server, policy):
    """SIGSTOP, of the whole server and of its core alone, with a short patience and with a long one."""
    expected = groups_of(draw(policy))
    for process in (api_server(server.process.pid), engine_core(server.process.pid)):
        hasty = rl.VLLMServer(policy, url=server.url, deadline=10)
        policy.use(hasty)
        draw(policy)
        with stopped(process), pytest.raises(EngineError, match=r"127.0.0.1:\d+ .* (10 s|within 10 s)"):
            draw(policy, seed=1)
        assert groups_of(draw(policy)) == expected
    patient = policy.use(rl.VLLMServer(policy, url=server.url, deadline=LONG)).engine
    draw(policy)
    with stopped(api_server(server.process.pid), at_most=10):
        assert groups_of(draw(policy)) == expected
    assert patient.version == 0


def test_two_ranks_send_their_own_prompts_and_share_the_weights(server, folder, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", CLIENT]
    command += ["ranks", server.url, folder, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    alone = two_steps(rl.setup(seed=0), server.url, folder)
    for place in range(2):
        assert max(rank[place]["gap"] for rank in ranks) < GAP
        assert ranks[0][place]["tokens"] + ranks[1][place]["tokens"] == alone[place]["tokens"]


# Its death; these come last


def test_a_core_and_a_server_that_were_killed_lose_nothing(server, folder):
    """kill -9 of the core; a new server at the same port goes on where the old one was; then kill -9 of that one."""
    policy = vllm_policy()
    policy.use(rl.VLLMServer(policy, url=server.url))
    step(policy, draw(policy))
    expected, port = groups_of(draw(policy)), int(server.url.rsplit(":", 1)[1])
    everyone = family(server.process.pid)
    killer = threading.Timer(0.3, engine_core(server.process.pid).kill)
    killer.start()
    with pytest.raises(EngineError, match=rf"127.0.0.1:{port}.*(died|ended|no server answers).*Nothing of the step"):
        draw_for_ever(policy)
    until(lambda: not alive(everyone), "the whole server to end")
    assert server.process.wait() == 1
    with pytest.raises(EngineError, match=rf"no server answers at 127.0.0.1:{port}.*rlkit serve MODEL --port {port}"):
        draw(policy)

    with rl.serve(folder, port=port, max_model_len=CONTEXT) as again:
        everyone = family(again.process.pid)
        assert groups_of(draw(policy)) == expected
        with pytest.raises(OSError, match=rf"port {port} of 127.0.0.1.*Address already in use.*Choose another port"):
            rl.serve(folder, port=port)
        killer = threading.Timer(0.3, api_server(again.process.pid).kill)
        killer.start()
        with pytest.raises(
            EngineError, match=rf"127.0.0.1:{port}.*(died|ended|no server answers).*Nothing of the step"
        ):
            draw_for_ever(policy)
        until(lambda: not alive(everyone), "the whole server to end")


def draw_for_ever(policy):
    while True:
        draw(policy, num_generations=16, max_completion_length=200, min_completion_length=200)


def test_a_server_ends_with_the_process_that_started_it(folder):
    """While it is loading: the core is there, and nobody answers yet."""
    with subprocess.Popen([sys.executable, CLIENT, "serve", folder]) as parent:
        until(lambda: named(parent.pid, "multiprocessing.spawn"), "the core to start")
        everyone = family(parent.pid)
        parent.kill()
    until(lambda: not alive(everyone), "the whole server to end")


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_command_serves_smollm2_for_two_steps_and_ends_with_ctrl_c(tmp_path):
    """From the command line: the line that says when it is ready, an offline name, and what is left after Ctrl-C."""
    pytest.importorskip("gguf")
    port = free_port()
    command = [sys.executable, "-m", "rlkit.cli", "serve", "smollm2", "--port", str(port), "--max-model-len", "256"]
    log = tmp_path / "vllm.log"
    with subprocess.Popen([*command, "--log", str(log)], stdout=subprocess.PIPE, text=True) as process:
        try:
            policy = rl.load_policy("smollm2", device="cpu")  # while the server loads
        except ValueError:
            process.terminate()
            pytest.skip("SmolLM2-135M is not installed")
        said = process.stdout.readline()  # or nothing, once it has ended
        ready = said.startswith(f"rlkit serve: smollm2 is ready at http://127.0.0.1:{port} (float32)")
        assert ready, said + log.read_text()[-3000:]
        policy.use(rl.VLLMServer(policy, url=f"127.0.0.1:{port}"))
        optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=1e-5)
        for seed in range(2):
            rollout = draw(policy, ["The capital of France is"], num_generations=4, max_completion_length=12, seed=seed)
            assert sampler_gap(policy, rollout) < SMOLLM2_GAP
            rl.loss_step(policy, optimizer, rollout, torch.tensor([1.0, -1.0, 0.5, -0.5]))
        everyone = family(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 130
    until(lambda: not alive(everyone), "the whole server to end")
