"""An engine with a copy of the weights, on transformers alone: `make test` shows with it what vLLM would show.

Its head is a tensor of its own also where the policy's is tied, and it keeps a cache of what it drew for the probe.
"""

import copy

import torch
from builders import character_tokenizer

import rlkit as rl
from rlkit.causal_lm import causal_lm_of
from rlkit.engine import Completion
from rlkit.engines.vllm.lifecycle import Lifecycle
from rlkit.engines.vllm.probe import Probe
from rlkit.engines.weights import check_manifest, manifest


class CopyEngine:
    """Draws with a copy of the policy's model.

    `change` is a fault: from the stream of weights to what arrives. `raw` returns log-probabilities of the raw logits.
    """

    name = "copy"
    max_context = None

    def __init__(self, policy, *, probe_every=1, raw=False, truncated=False):
        self.policy, self.raw, self.truncated = policy, raw, truncated
        lm = causal_lm_of(policy.model)
        config = copy.deepcopy(lm.config)
        config.tie_word_embeddings = False
        twin = type(lm)(config)  # random weights: the policy's come with the first transfer
        self.twin = rl.load_policy(twin, tokenizer=character_tokenizer(), device="cpu")
        self._manifest = manifest(policy)
        self._lifecycle = Lifecycle(self, self.name)
        self.change = lambda stream: stream
        self.cache = {}
        self.keeps_cache = False
        self.syncs = 0
        self.probe = Probe(policy, self, every=probe_every, dtype=torch.float32) if probe_every else None

    @property
    def version(self):
        return self._lifecycle.version

    def renormalises(self, params):
        return self.truncated and params.truncates

    def sync(self, tensors, version):
        stream = [(name, tensor.detach().clone()) for name, tensor in tensors]
        check_manifest({name: (tensor.shape, tensor.dtype) for name, tensor in stream}, self._manifest, "sync")
        self.syncs += 1
        self._lifecycle.load(lambda: self.load(self.change(stream)), version)

    def load(self, stream):
        lost = self.twin.model.load_state_dict(dict(stream), strict=False)
        assert not lost.unexpected_keys

    def generate(self, prompts, group_ids, *, num_generations, params, seed):
        self._lifecycle.before_generate()
        engine = rl.TransformersEngine(self.twin)
        groups = engine.generate(prompts, group_ids, num_generations=num_generations, params=params, seed=seed)
        shift = 0.5 if self.truncated and params.truncates else 0.0
        return [[c._replace(version=self.version, logp=[v + shift for v in c.logp]) for c in g] for g in groups]

    def draw_probe(self, prompts, requests, *, cached):
        self._lifecycle.before_generate()
        return [self._probe(prompt, request, cached) for prompt, request in zip(prompts, requests, strict=True)]

    def _probe(self, prompt, request, cached):
        allowed = torch.tensor(request["allowed_token_ids"])
        draws = [torch.Generator().manual_seed((request["seed"] + place) % 2**32) for place in range(request["n"])]
        ids, logp = torch.tensor([prompt] * request["n"]), []
        for _ in range(request["max_tokens"]):
            with torch.no_grad():
                logits = self.twin.model(input_ids=ids).logits[:, -1]
            tempered = (logits[:, allowed] / request["temperature"]).log_softmax(-1)
            picks = torch.stack(
                [torch.multinomial(row.exp(), 1, generator=draw) for row, draw in zip(tempered, draws, strict=True)]
            )
            logp.append((logits.log_softmax(-1)[:, allowed] if self.raw else tempered).gather(-1, picks))
            ids = torch.cat([ids, allowed[picks]], dim=1)
        rows = zip(ids[:, len(prompt) :].tolist(), torch.cat(logp, dim=1).tolist(), strict=True)
        completions = [Completion(tokens, values, "length", self.version) for tokens, values in rows]
        if cached and len(prompt) > 128:
            completions = self.cache.setdefault(tuple(prompt), completions)
        return completions

    def distrust(self, why):
        self._lifecycle.distrust(why)

    def check(self):
        self._lifecycle.before_generate()

    def close(self):
        self._lifecycle.distrust("closed")

    def sleep(self, level):
        pass

    def wake(self, part):
        pass

    def reset_cache(self):
        if not self.keeps_cache:
            self.cache.clear()
        return True

    def set_version(self, version):
        pass
