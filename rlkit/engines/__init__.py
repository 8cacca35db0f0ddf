"""Engines beside the default one: vLLM in the process, vLLM as a server, transformers' continuous batching."""
