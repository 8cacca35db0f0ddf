"""Rewards: from a Rollout to Scores, through plain functions in TRL's calling form."""

from rlkit.rewards.score import RewardFunction, score

__all__ = ["RewardFunction", "score"]
