"""Tiny models that vLLM can run: heads of 32 numbers, tied and untied, with and without biases."""

import torch
from builders import BOS, EOS, PAD, VOCABULARY, character_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import rlkit as rl

CONTEXT = 512
SIZE = len(VOCABULARY)
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def tiny_model(kind="llama", *, tied=True, seed=0, vocab_size=SIZE, layers=2):
    """A random model of about 100,000 parameters with clearly unequal probabilities."""
    config_class, model_class = KINDS[kind]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at 0, which would hide a bias that is lost
                parameter.normal_(std=0.3)
    return model


def vllm_policy(kind="llama", *, peft_config=None, **options):
    """A policy around a tiny model, with a character tokenizer."""
    return rl.load_policy(
        tiny_model(kind, **options), tokenizer=character_tokenizer(), device="cpu", peft_config=peft_config
    )
