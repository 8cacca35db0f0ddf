"""Engines beside the default one: vLLM in the process and what every engine with weights of its own shares."""
