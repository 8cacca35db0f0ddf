"""Rewards: from a Rollout to Scores, through functions in TRL's calling form and reward models."""

from rlkit.rewards.arguments import StepState
from rlkit.rewards.monitor import Monitor
from rlkit.rewards.reward_model import RewardModel
from rlkit.rewards.score import RewardFunction, score
from rlkit.rollout import text_of

__all__ = ["Monitor", "RewardFunction", "RewardModel", "StepState", "score", "text_of"]
