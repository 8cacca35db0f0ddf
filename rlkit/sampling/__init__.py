"""Sampling: from a PromptBatch to a Rollout, through one protocol for every engine."""

from rlkit.rollout import SamplingParams
from rlkit.sampling.engine import Completion, Engine, EngineError
from rlkit.sampling.sample import sample
from rlkit.sampling.transformers_engine import TransformersEngine

__all__ = ["Completion", "Engine", "EngineError", "SamplingParams", "TransformersEngine", "sample"]
