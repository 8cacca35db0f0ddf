"""Hand-made records and tiny real models, for the tests of every module."""

import copy
from collections.abc import Sequence

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

import rlkit as rl
from rlkit.loading import load_policy
from rlkit.policy import Policy
from rlkit.prompts import PromptTokenizer
from rlkit.reward_calls import child
from rlkit.reward_calls.worker import Worker
from rlkit.types import Rollout, SamplingParams, Scores

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNKNOWN = range(4)
CHARACTERS = "0123456789+-=?abcdefghijklmnopqrstuvwxyz :"
VOCABULARY = {token: place for place, token in enumerate((*SPECIAL, *CHARACTERS))}
CONTEXT = 64
LETTERS = ("<pad>", "<eos>", "a", "b", "c")  # a vocabulary whose completions can be listed
SIZE = len(VOCABULARY)
IDS = {"vocab_size": SIZE, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
# The weights are large enough for clearly unequal probabilities.
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
# vLLM wants heads of 32 numbers.
FOR_VLLM = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% if not loop.last %} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %} a:{% endif %}"
)


def by_character(vocabulary, *, unknown):
    """The core of a tokenizer with one token per character."""
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return core


def character_tokenizer(*, adds_bos=False, adds_eos=False, chat_template=None, pad_token="<pad>"):
    """A real tokenizer with one token per character; as an option it adds special tokens by itself, as Llama's does."""
    core = by_character(VOCABULARY, unknown="<unk>")
    if adds_bos or adds_eos:
        form = ("<bos> " if adds_bos else "") + "$A" + (" <eos>" if adds_eos else "")
        core.post_processor = processors.TemplateProcessing(
            single=form, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token=pad_token
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def ids_of(text):
    """The token ids of a text in the character tokenizer."""
    return [VOCABULARY[character] for character in text]


def tokenize_prompt(tokenizer, prompt):
    """Token ids of a text or a conversation."""
    own = PromptTokenizer(tokenizer)
    return own.encode([own.render(prompt)])[0]


def worker_pids():
    """Process ids of the living reward workers of this process."""
    return [one.pid for one in list(child._children) if one.alive and isinstance(one, Worker)]


def random_model(kind, *, seed=0, **settings):
    """A random language model, "llama" or "qwen2", of a few thousand parameters; `settings` are its configuration's."""
    torch.manual_seed(seed)
    name = {"llama": "Llama", "qwen2": "Qwen2"}[kind]
    config = getattr(hf, f"{name}Config")(**(IDS | SMALL | settings))
    return getattr(hf, f"{name}ForCausalLM")(config)


def llama(*, seed=0, layers=2, tied=False, attention_dropout=0.0):
    """A random Llama of a few thousand parameters."""
    return random_model(
        "llama",
        seed=seed,
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        attention_dropout=attention_dropout,
    )


def gpt2_with_dropout(*, seed=0, dropout=0.1):
    """A random GPT-2 with dropout modules everywhere, which `model.train()` switches on."""
    torch.manual_seed(seed)
    config = hf.GPT2Config(
        **IDS,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=CONTEXT,
        initializer_range=0.3,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return hf.GPT2LMHeadModel(config)


def vllm_model(kind="llama", *, tied=True, seed=0, vocab_size=SIZE):
    """A random model of about 100,000 parameters that vLLM can run: tied or not, Qwen2 with biases."""
    model = random_model(kind, seed=seed, **FOR_VLLM, tie_word_embeddings=tied, vocab_size=vocab_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at 0, which would hide a bias that is lost
                parameter.normal_(std=0.3)
    return model


def tiny_policy(model: nn.Module | None = None, *, tokenizer=None, autocast=None, **model_options) -> Policy:
    """A policy around a tiny random model, on the CPU."""
    model = llama(**model_options) if model is None else model
    return load_policy(model, tokenizer=tokenizer or character_tokenizer(), device="cpu", autocast=autocast)


def vllm_policy(kind="llama", *, peft_config=None, **model_options) -> Policy:
    """A policy around a model that vLLM can run."""
    model = vllm_model(kind, **model_options)
    return load_policy(model, tokenizer=character_tokenizer(), device="cpu", peft_config=peft_config)


def lora_config(**options):
    """An adapter that is not zero: a fresh one has B = 0, so the gradient of A is 0 and half of it is not tested."""
    from peft import LoraConfig

    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | options
    return LoraConfig(**options)


def letter_policy(*, seed=0) -> Policy:
    """A policy over the five tokens of LETTERS."""
    core = by_character({token: place for place, token in enumerate(LETTERS)}, unknown="<pad>")
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 16}
    ids = {"vocab_size": len(LETTERS), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return tiny_policy(random_model("llama", seed=seed, **sizes, **ids), tokenizer=tokenizer)


def make_rollout(
    lengths: Sequence[int] = (3, 1, 2, 3),
    *,
    prompt_lengths: Sequence[int] | None = None,
    group_id: Sequence[int] | None = None,
    row_id: Sequence[int] | None = None,
    truncated: Sequence[bool] | None = None,
    prompts: Sequence[object] | None = None,
    completions: Sequence[object] | None = None,
    columns: dict | None = None,
    sampler_logp: torch.Tensor | None = None,
    sampling: SamplingParams | None = None,
    width: int | None = None,
    seed: int = 0,
) -> Rollout:
    """A rollout of random tokens with completions of the given lengths; two rows per group unless told otherwise."""
    rows = len(lengths)
    draw = torch.Generator().manual_seed(seed)
    prompt_lengths = [2 + row % 2 for row in range(rows)] if prompt_lengths is None else prompt_lengths
    prompt_width, width = max(prompt_lengths), max(lengths) if width is None else width
    prompt_mask = torch.arange(prompt_width) >= prompt_width - torch.tensor(prompt_lengths)[:, None]
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    prompt_ids = torch.randint(len(SPECIAL), len(VOCABULARY), (rows, prompt_width), generator=draw)
    ids = torch.stack([torch.randint(len(SPECIAL), len(VOCABULARY), (64,), generator=draw)[:width] for _ in lengths])
    return Rollout(
        prompt_ids=prompt_ids.masked_fill(~prompt_mask, PAD),
        prompt_mask=prompt_mask,
        completion_ids=ids.masked_fill(~mask, PAD),
        completion_mask=mask,
        sampler_logp=torch.zeros(rows, width) if sampler_logp is None else sampler_logp,
        group_id=torch.tensor([row // 2 for row in range(rows)] if group_id is None else group_id),
        row_id=torch.tensor([100 + row // 2 for row in range(rows)] if row_id is None else row_id),
        truncated=torch.tensor([False] * rows if truncated is None else truncated),
        prompts=tuple(f"{row}+1=" for row in range(rows)) if prompts is None else tuple(prompts),
        completions=tuple(str(row) for row in range(rows)) if completions is None else tuple(completions),
        columns=columns or {},
        sampling=sampling or SamplingParams(),
    )


def completion_tokens(rollout: Rollout) -> list[list[int]]:
    """The token ids of each completion, without padding."""
    return [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)]


def make_scores(rewards: Sequence[float | None], group_id: Sequence[int] | None = None) -> Scores:
    """Scores of one reward function; None is a row without a reward."""
    reward = torch.tensor([float("nan") if value is None else value for value in rewards], dtype=torch.float32)
    group = torch.zeros(len(reward), dtype=torch.int64) if group_id is None else torch.tensor(group_id)
    return Scores(parts=reward[:, None].clone(), names=("r",), weights=torch.ones(1), reward=reward, group_id=group)


def draw(policy, prompts, *, seed, num_generations=4, max_completion_length=9, **settings):
    """A rollout of plain prompts."""
    return rl.sample(
        policy,
        prompts,
        num_generations=num_generations,
        max_completion_length=max_completion_length,
        seed=seed,
        **settings,
    )


def length(completion_ids):
    """A reward function: the length of each completion."""
    return [float(len(ids)) for ids in completion_ids]


def never(completions):
    """A reward function that never answers."""
    return [None] * len(completions)


class RecordingSGD(torch.optim.SGD):
    """SGD that keeps the gradients it was called with; `loss_step` drops them afterwards."""

    def step(self, closure=None):
        self.gradients = [p.grad.detach().clone() for group in self.param_groups for p in group["params"]]
        return super().step(closure)


def snapshot(*objects):
    """A deep copy of the state of modules, optimizers and schedulers, to compare bit for bit."""
    return copy.deepcopy([item.state_dict() for item in objects])


def assert_identical(left, right):
    """Two nested structures are equal bit for bit; NaN equals NaN."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape
        assert left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_identical(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert type(left) is type(right) and len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_identical(one, other)
    else:
        assert type(left) is type(right)
        assert left == right or (left != left and right != right)
