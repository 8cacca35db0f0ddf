"""rlkit: online reinforcement learning of language models in notebooks, as small steps that your own loop calls.

Axis letters, the same everywhere: P prompts in the step, G completions per prompt, B = P*G rows (prompt-major), T
completion tokens, L prompt tokens, V vocabulary, K reward functions. One mask meaning: True counts.

    dataset rows -> PromptBatch -> sample -> Rollout -> score -> Scores -> advantages -> loss_step -> Update -> Run
"""

from rlkit import _openmp, losses, metrics, oracle, rewards, tasks  # _openmp first: it acts before torch is loaded
from rlkit._version import __version__ as __version__
from rlkit.advantages import compute_loo_advantage, compute_optimal_advantage, optimal_value
from rlkit.dynamic_sampling import Accumulated, accumulate, drop_uninformative_groups
from rlkit.engine import EngineError
from rlkit.engines import ContinuousBatching, Server, VLLMColocate, VLLMMemory, VLLMServer, serve, vllm_memory
from rlkit.engines.transformers_engine import TransformersEngine
from rlkit.evaluation.compare import Comparison, Evaluation
from rlkit.evaluation.evaluate import evaluate
from rlkit.export import ExportError, export
from rlkit.export.launch import launch
from rlkit.kl import compute_kl
from rlkit.loading import load_policy
from rlkit.logps import compute_logps
from rlkit.losses import RLOO, AStarPO, LossInputs, a2po_loss, rloo_loss
from rlkit.policy import Policy
from rlkit.prompts import PromptLoader, make_batch
from rlkit.reference import update_reference
from rlkit.run import Run, RunReader
from rlkit.run.model_card import model_card
from rlkit.sampling import sample
from rlkit.scoring import score
from rlkit.step import loss_step
from rlkit.types import PromptBatch, Rollout, SamplingParams, Scores, Update
from rlkit.view import Dashboard, show_completions
from rlkit.vstar import ValueTable, estimate_vstar
from rlkit.world import World, setup

del _openmp

__all__ = [
    "RLOO",
    "AStarPO",
    "Accumulated",
    "Comparison",
    "ContinuousBatching",
    "Dashboard",
    "EngineError",
    "Evaluation",
    "ExportError",
    "LossInputs",
    "Policy",
    "PromptBatch",
    "PromptLoader",
    "Rollout",
    "Run",
    "RunReader",
    "SamplingParams",
    "Scores",
    "Server",
    "TransformersEngine",
    "Update",
    "VLLMColocate",
    "VLLMMemory",
    "VLLMServer",
    "ValueTable",
    "World",
    "a2po_loss",
    "accumulate",
    "compute_kl",
    "compute_logps",
    "compute_loo_advantage",
    "compute_optimal_advantage",
    "drop_uninformative_groups",
    "estimate_vstar",
    "evaluate",
    "export",
    "launch",
    "load_policy",
    "loss_step",
    "losses",
    "make_batch",
    "metrics",
    "model_card",
    "optimal_value",
    "oracle",
    "rewards",
    "rloo_loss",
    "sample",
    "score",
    "serve",
    "setup",
    "show_completions",
    "tasks",
    "update_reference",
    "vllm_memory",
]
