"""Evaluation without training: rewards on held-out data, pass@k, and comparisons of two evaluations."""

from rlkit.evaluation.compare import Comparison, Evaluation
from rlkit.evaluation.evaluate import evaluate

__all__ = ["Comparison", "Evaluation", "evaluate"]
