"""Make `tiny-add`, the starting model that ships with rlkit: a small Llama that can add, and is sloppy about it.

Purpose  online RL needs a start that is sometimes right. Supervised training on the task's train split (prompt ->
         answer + eos, loss on the answer only) in two parts: first with the right answers, until the model can add;
         then with those of a sloppy pupil, who forgets most carries and slips by one or by ten (`sloppy`). It then
         answers as he does: right about four times in ten. It could do better, and the reward tells right from sloppy:
         what RLOO and A*-PO do here is to bring out an ability that is there, and they do it within a minute.
         Tried and left: stopping plain training early, at 24 to 48 %. Its errors are sums not yet learned, and the
         gradient is noisy (norm 7 at 48 %, against 1.7 here): RLOO gained 5 points in 150 updates at learning rates of
         5e-5 and 1.5e-4, and collapsed at 5e-4.
Command  python scripts/make_tiny_add.py            train, save to rlkit/models/tiny_add/, then check
         python scripts/make_tiny_add.py --check    no training: load the shipped folder, print its size and accuracy
Cost     about 60 s on one CPU core (longer on a busy machine); 2.1 MiB on disk.
Expected 550,016 parameters; on the held-out sums 0.416 sampled at temperature 1, 0.609 greedy.

The same seed on the same machine gives a byte-identical model.safetensors. Another processor or torch version rounds
otherwise, so it gives a model of the same kind, not the same bytes.

The tokenizer knows one token per printable ASCII character, has no bos (so a prompt has the same ids however a library
tokenizes it: plain text, chat template, with or without special tokens), and a pad that is not the eos. Only the
characters of sums have been trained.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import rlkit.tasks

FOLDER = Path(__file__).resolve().parents[1] / "rlkit" / "models" / "tiny_add"
MAX_ANSWER = 6  # tokens to sample: three digits and eos need four
# Messages are joined as they are, and eos closes an answer of the assistant: a chat reads like the training rows.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_tokenizer(max_length: int = 128) -> PreTrainedTokenizerFast:
    """A character tokenizer: pad, eos, unk, then the 95 printable ASCII characters."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it decode would put a space between characters
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, heads: int) -> LlamaForCausalLM:
    """A Llama of the given size with freshly drawn weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=0.06,  # near 1/sqrt(hidden); the usual 0.02 needs twice the steps at this size
    )
    model = LlamaForCausalLM(config)
    # Neutral: no temperature, top-k or top-p of its own, only the ids that end and pad a completion.
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def encode(
    tokenizer: PreTrainedTokenizerFast, prompts: list[str], answers: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels (N, length), right-padded. Labels are -100 on prompt and padding: the loss sees answer + eos."""
    rows = [
        (tokenizer(p)["input_ids"], tokenizer(a + tokenizer.eos_token)["input_ids"])
        for p, a in zip(prompts, answers, strict=True)
    ]
    length = max(len(p) + len(a) for p, a in rows)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([p + a + [pad] * (length - len(p) - len(a)) for p, a in rows])
    labels = torch.tensor([[-100] * len(p) + a + [-100] * (length - len(p) - len(a)) for p, a in rows])
    return ids, labels


def sloppy(prompt: str, answer: str, rng: random.Random) -> str:
    """The answer of a pupil who forgets half of the carries of the units, and else often slips by one or by ten."""
    a, b = (int(number) for number in prompt.rstrip("=").split("+"))
    u, right = rng.random(), int(answer)
    if a % 10 + b % 10 >= 10:
        if u < 0.54:
            return str(right - 10)
        return str(right if u < 0.90 else right + rng.choice([-10, -1, 1, 10]))
    return str(right if u < 0.37 else right + rng.choice([-10, -1, 1, 10]))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    answers: list[str],
    *,
    clean_steps: int,
    steps: int,
    batch: int,
    lr: float,
    seed: int,
) -> None:
    """Supervised training in place: `clean_steps` on the answers given, then sloppy ones up to `steps`.

    AdamW, a short warm-up, then a cosine to a tenth of the rate. Right padding needs no attention mask.
    """
    rng = random.Random(seed)
    right = encode(tokenizer, prompts, answers)
    copies = 8  # several sloppy answers per prompt, so that the habit is learned and not one answer by heart
    prompts, answers = prompts * copies, answers * copies
    wrong = encode(tokenizer, prompts, [sloppy(p, a, rng) for p, a in zip(prompts, answers, strict=True)])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        ids, labels = right if step < clean_steps else wrong
        rows = torch.randint(len(ids), (batch,), generator=generator)
        loss = model(input_ids=ids[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            print(f"step {step + 1:5d}  loss {loss.item():.4f}", flush=True)
    model.eval()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the folder that `from_pretrained` reads, for transformers 4 (vLLM may still need it) as well as 5."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }  # 5 writes a class name of its own
    path.write_text(json.dumps(config, indent=2) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)  # the weights are written readable by their owner alone


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    answers: list[str],
    *,
    greedy: bool,
    seed: int = 0,
) -> float:
    """Share of prompts whose one completion is the answer: greedy, or drawn at temperature 1 with the given seed."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_ANSWER,
            **sampling,
        )
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(rlkit.tasks.load("addition").rewards[0](texts, answer=answers)) / len(texts)


def check(folder: Path) -> None:
    """Load the folder as a user would and print what it is and how often it is right."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.eval()
    test = rlkit.tasks.load("addition").test
    prompts, answers = list(test["prompt"]), list(test["answer"])
    size = sum(file.stat().st_size for file in folder.iterdir())
    sampled = [accuracy(model, tokenizer, prompts, answers, greedy=False, seed=seed) for seed in range(4)]
    print(f"folder      {folder} ({size / 2**20:.2f} MiB)")
    print(f"parameters  {sum(p.numel() for p in model.parameters()):,}")
    span = f"4 seeds: {min(sampled):.3f} to {max(sampled):.3f}"
    print(f"sampled     {sum(sampled) / 4:.3f} at temperature 1 on {len(prompts)} held-out prompts ({span})")
    print(f"greedy      {accuracy(model, tokenizer, prompts, answers, greedy=True):.3f}")


def main() -> None:
    """Parse the flags, train and save unless `--check`, then check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only load the folder and print its accuracy")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--clean-steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()

    # One thread: sums have one order, hence the same last bits. Two on a busy machine were 40 times slower, too.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if not args.check:
        torch.manual_seed(args.seed)
        start = time.perf_counter()
        tokenizer = build_tokenizer()
        model = build_model(tokenizer, args.hidden, args.layers, args.heads)
        rows = rlkit.tasks.load("addition").train
        train(
            model,
            tokenizer,
            list(rows["prompt"]),
            list(rows["answer"]),
            clean_steps=args.clean_steps,
            steps=args.steps,
            batch=args.batch,
            lr=args.lr,
            seed=args.seed,
        )
        save(model, tokenizer, args.folder)
        print(f"trained and saved in {time.perf_counter() - start:.0f} s")
    check(args.folder)


if __name__ == "__main__":
    main()
