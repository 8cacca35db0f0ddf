"""Rewards: from a Rollout to Scores, through functions in TRL's calling form and reward models.

`score` calls them. The others are ready-made: a capitalised name is made with settings (`SoftOverlong(512, cache=64)`),
its lower-case twin has the default ones (`accuracy`).
"""

from rlkit.reward_calls.arguments import StepState
from rlkit.reward_calls.monitor import Monitor
from rlkit.reward_calls.reward_model import RewardModel
from rlkit.reward_calls.settings import RewardSettings
from rlkit.rewards.answers import answer_part, completion_text, last_boxed
from rlkit.rewards.code_tests import PythonTests, python_tests
from rlkit.rewards.formats import ThinkFormat, think_format
from rlkit.rewards.lengths import CosineLength, RepetitionPenalty, SoftOverlong
from rlkit.rewards.matching import BoxedMatch, ExactMatch, NumericMatch, boxed_match, exact_match, numeric_match
from rlkit.rewards.math_accuracy import Accuracy, accuracy, check_gold
from rlkit.rewards.probes import probe
from rlkit.scoring import RewardFunction, score

__all__ = [
    "Accuracy",
    "BoxedMatch",
    "CosineLength",
    "ExactMatch",
    "Monitor",
    "NumericMatch",
    "PythonTests",
    "RepetitionPenalty",
    "RewardFunction",
    "RewardModel",
    "RewardSettings",
    "SoftOverlong",
    "StepState",
    "ThinkFormat",
    "accuracy",
    "answer_part",
    "boxed_match",
    "check_gold",
    "completion_text",
    "exact_match",
    "last_boxed",
    "numeric_match",
    "probe",
    "python_tests",
    "score",
    "think_format",
]
