"""Sequence-classification models as rewards: by folder, by object, plain and conversational, batched as alone."""

import pytest
import torch
from builders import CHARACTERS, CHAT_TEMPLATE, EOS, PAD, VOCABULARY, character_tokenizer, ids_of, llama, make_rollout
from tolerances import FLOAT32
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import rlkit as rl
from rlkit.reward_calls.reward_model import RewardModel

assert set("abc123+=") <= set(CHARACTERS)
PROMPTS = ["1+1=", "2+2=", "a", "12+34="]
COMPLETIONS = ["2", "22222222", "bcd", ""]
PLAIN = make_rollout((1,) * 4, prompts=PROMPTS, completions=COMPLETIONS)
MESSAGES = make_rollout(
    (1,) * 4,
    prompts=[[{"role": "user", "content": text}] for text in PROMPTS],
    completions=[[{"role": "assistant", "content": text}] for text in COMPLETIONS],
)


def classifier(*, labels=1, pad=PAD, seed=0, kind="llama", dropout=0.0):
    torch.manual_seed(seed)
    common = {"vocab_size": len(VOCABULARY), "num_labels": labels, "pad_token_id": pad, "initializer_range": 0.3}
    if kind == "gpt2":
        return GPT2ForSequenceClassification(
            GPT2Config(
                n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=dropout, embd_pdrop=dropout, **common
            )
        )
    return LlamaForSequenceClassification(
        LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=64, attention_dropout=dropout, **common,
        )
    )  # fmt: skip


@torch.no_grad()
def by_hand(model, ids):
    """The head on the last token of one text, without padding: hidden states of the backbone times the head's row."""
    backbone = model.model if hasattr(model, "model") else model.transformer
    hidden = backbone.eval()(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    return float(model.score.weight[0] @ hidden)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "judge-v1"
    classifier().save_pretrained(path)
    character_tokenizer(chat_template=CHAT_TEMPLATE).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_plain_text_is_prompt_and_completion_batched_as_alone(kind, batch_size):
    """Padding on the right changes nothing; the oracle runs each text by itself through the backbone."""
    model = classifier(kind=kind)
    reward = RewardModel(model, character_tokenizer(), batch_size=batch_size)
    want = [by_hand(model, ids_of(p + c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(rl.score(PLAIN, reward).reward, torch.tensor(want), **FLOAT32)


def test_a_conversation_is_written_by_the_models_own_template():
    """CHAT_TEMPLATE by hand: <bos>u:PROMPT a:COMPLETION."""
    model = classifier()
    reward = RewardModel(model, character_tokenizer(chat_template=CHAT_TEMPLATE))
    want = [
        by_hand(model, [VOCABULARY["<bos>"], *ids_of(f"u:{p} a:{c}")])
        for p, c in zip(PROMPTS, COMPLETIONS, strict=True)
    ]
    torch.testing.assert_close(rl.score(MESSAGES, reward).reward, torch.tensor(want), **FLOAT32)


def test_a_prefilled_answer_is_one_message():
    """A prompt that ends with the assistant's first words."""
    model = classifier()
    reward = RewardModel(model, character_tokenizer(chat_template=CHAT_TEMPLATE))
    rollout = make_rollout(
        (1,),
        prompts=[[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "so "}]],
        completions=[[{"role": "assistant", "content": "2"}]],
    )
    want = by_hand(model, [VOCABULARY["<bos>"], *ids_of("u:1+1= a:so 2")])
    torch.testing.assert_close(rl.score(rollout, reward).reward, torch.tensor([want]), **FLOAT32)
    assert rollout.prompts[0][-1]["content"] == "so "


def test_by_folder_with_its_own_tokenizer_beside_a_function(folder):
    """A model and a function that abstains; the name is the last part of the path."""
    scores = rl.score(PLAIN, [str(folder), lambda completions: [None] * 4])
    assert scores.names == ("judge-v1", "lambda")
    model = classifier()
    want = [by_hand(model, ids_of(p + c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(scores.reward, torch.tensor(want), **FLOAT32)
    again = rl.score(MESSAGES, folder)  # a Path, and one value alone
    assert again.names == ("judge-v1",) and not bool(again.reward.isnan().any())


def test_a_folder_is_loaded_once(folder, monkeypatch):
    from rlkit.reward_calls import reward_model

    loads = []
    load = reward_model._load
    monkeypatch.setattr(reward_model, "_load", lambda *args: loads.append(args) or load(*args))
    for _ in range(3):
        rl.score(PLAIN, [str(folder)])
    assert len(loads) == 1


def test_as_an_object_with_its_tokenizer_as_an_attribute():
    model = classifier()
    model.tokenizer = character_tokenizer()
    want = [by_hand(model, ids_of(p + c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    scores = rl.score(PLAIN, model)
    assert scores.names == ("LlamaForSequenceClassification",)
    torch.testing.assert_close(scores.reward, torch.tensor(want), **FLOAT32)


def test_two_models_of_one_name_are_told_apart(folder):
    assert rl.score(PLAIN, [str(folder), str(folder)]).names == ("judge-v1", "judge-v1_2")


@pytest.mark.parametrize("config_pad", [None, PAD, EOS])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_tokenizer_without_a_pad_token(kind, config_pad):
    """The tokenizer and the config are as they were afterwards, and no embedding is added."""
    tokenizer = character_tokenizer(pad_token=None)
    model = classifier(kind=kind, pad=config_pad)
    embeddings = model.get_input_embeddings().weight.shape
    reward = RewardModel(model, tokenizer, batch_size=4)
    want = [by_hand(model, ids_of(p + c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(rl.score(PLAIN, reward).reward, torch.tensor(want), **FLOAT32)
    assert tokenizer.pad_token is None and tokenizer.padding_side == character_tokenizer().padding_side
    assert model.config.pad_token_id == config_pad and model.get_input_embeddings().weight.shape == embeddings


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=len(VOCABULARY), num_labels=1, max_position_embeddings=64, initializer_range=0.3, **sizes)
    )


@pytest.mark.parametrize("config_pad", [None, PAD, EOS, -1])
@pytest.mark.parametrize("pad_token", [None, "<pad>", "<eos>"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_is_read_as_each_text_alone(pad_token, config_pad, side):
    """Whatever pads, and with texts that end with the end token, which is no padding where the config does not say so.

    The oracle is the model's own logits on the text alone, unpadded, under its own config.
    """
    tokenizer = character_tokenizer(chat_template=CHAT_TEMPLATE + "{{ eos_token }}", pad_token=pad_token)
    tokenizer.padding_side = side
    models = [classifier(), classifier(kind="gpt2")] + [bert()] * (config_pad == PAD)
    for model in models:
        model.config.pad_token_id = config_pad
        reward = RewardModel(model, tokenizer, batch_size=3)  # rows of unequal lengths, and a second batch
        want = []
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            ids = [VOCABULARY["<bos>"], *ids_of(f"u:{prompt} a:{completion}"), EOS]
            with torch.no_grad():
                want.append(float(model.eval()(input_ids=torch.tensor([ids])).logits[0, 0]))
            if config_pad in (None, -1, PAD) and model.config.model_type != "bert":  # the last token, by hand too
                assert want[-1] == pytest.approx(by_hand(model, ids), abs=1e-5)
        torch.testing.assert_close(rl.score(MESSAGES, reward).reward, torch.tensor(want), **FLOAT32)
        assert model.config.pad_token_id == config_pad and tokenizer.pad_token == pad_token


def test_a_config_that_disagrees_with_the_tokenizer():
    """The head would read the padding of short rows as text."""
    model = classifier(pad=EOS)
    reward = RewardModel(model, character_tokenizer())
    want = [by_hand(model, ids_of(p + c)) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(rl.score(PLAIN, reward).reward, torch.tensor(want), **FLOAT32)
    assert model.config.pad_token_id == EOS


def test_dropout_is_off_and_no_gradient_is_kept():
    model = classifier(kind="gpt2", dropout=0.5)
    model.train()
    reward = RewardModel(model, character_tokenizer())
    first, second = (rl.score(PLAIN, reward).reward for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not first.requires_grad and model.training


def test_what_is_no_reward_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification has 2 labels; a reward model has one"):
        RewardModel(classifier(labels=2), character_tokenizer())
    llama().save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=r"base has no trained head \(score.weight is missing\)"):
        rl.score(PLAIN, str(tmp_path / "base"))
    with pytest.raises(OSError, match=r"got 'no/such-model', which cannot be loaded"):
        rl.score(PLAIN, "no/such-model")
    with pytest.raises(ValueError, match=r"does not say where its tokenizer is; pass RewardModel\(model, tokenizer\)"):
        rl.score(PLAIN, classifier())
    with pytest.raises(ValueError, match=r"batch_size must be at least 1, got 0"):
        RewardModel(classifier(), character_tokenizer(), batch_size=0)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (MESSAGES, r"conversations, and the tokenizer of LlamaForSequenceClassification has no chat template"),
        (
            make_rollout((1, 1), prompts=["a", "a"], completions=["b", "b" * 64]),
            r"prompt and completion 1 have 65 tokens, and LlamaForSequenceClassification reads 64",
        ),
        (make_rollout((1, 1), prompts=["a", ""], completions=["b", ""]), r"prompt and completion 1 are empty"),
    ],
    ids=["no template", "too long", "empty"],
)
def test_texts_that_the_model_cannot_read_are_named(rollout, message):
    reward = RewardModel(classifier(), character_tokenizer())
    with pytest.raises(RuntimeError, match=rf"failed with ValueError: RewardModel: .*{message}"):
        rl.score(rollout, reward)


def test_one_text_that_is_too_long_may_cost_only_its_own_reward():
    rollout = make_rollout((1, 1), prompts=["a", "a"], completions=["b", "b" * 64])
    scores = rl.score(rollout, RewardModel(classifier(), character_tokenizer()), on_error="none")
    assert scores.reward.isnan().tolist() == [False, True]


def test_a_model_has_no_timeout():
    model = RewardModel(classifier(), character_tokenizer())
    with pytest.raises(
        ValueError, match=r"timeout names \['LlamaForSequenceClassification'\], .* can have one are \[\]"
    ):
        rl.score(PLAIN, model, timeout={"LlamaForSequenceClassification": 1.0})
    assert not bool(rl.score(PLAIN, model, timeout=60.0).reward.isnan().any())


def test_as_trl_scores_it(folder):
    """TRL's lines for a reward model, in the order of rloo_trainer.py, on the same texts."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import apply_chat_template

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    conversations = [{"messages": p + c} for p, c in zip(MESSAGES.prompts, MESSAGES.completions, strict=True)]
    for rollout, texts in (
        (PLAIN, [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]),
        (MESSAGES, [apply_chat_template(each, tokenizer)["text"] for each in conversations]),
    ):
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.no_grad():
            want = model(**inputs).logits[:, 0]
        torch.testing.assert_close(rl.score(rollout, str(folder)).reward, want, **FLOAT32)
