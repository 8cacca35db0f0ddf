"""ZeRO-3 without DeepSpeed and without a second process: what a user is told."""

import json
import sys

import pytest
import torch

import rlkit as rl
from rlkit.run.manifest import sealed
from rlkit.strategies.zero3 import wrap_zero3


def test_without_deepspeed_it_says_what_to_install(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        ImportError, match=r"world\.prepare: strategy 'zero3' needs DeepSpeed.*pip install 'rlkit-llm\[deepspeed\]'"
    ):
        wrap_zero3(policy, None)


def test_on_one_process_it_is_single(policy):
    policy, _ = rl.setup().prepare(policy, lambda params: torch.optim.SGD(params, lr=0.5), strategy="zero3")
    assert policy.strategy == "single" and "deepspeed" not in sys.modules


@pytest.mark.parametrize("saved", [{"strategy": "zero3", "processes": 2}, {"strategy": "zero3", "processes": 1}])
def test_its_checkpoint_is_not_for_another_strategy(policy, tmp_path, saved):
    folder = tmp_path / "run" / "ckpt" / "step-000002"
    folder.mkdir(parents=True)
    counters = {
        "step": 2,
        "logged_step": 1,
        "tokens": 0,
        "reward_calls": 0,
        "version": 2,
        "files": {},
        "optimizer_has_state": True,
        "numbers": None,
    }
    (folder / "run.json").write_text(json.dumps(sealed(counters | saved)), encoding="utf-8")
    (folder.parent / "latest").write_text(folder.name, encoding="utf-8")
    policy, optimizer = rl.setup().prepare(policy, lambda params: torch.optim.SGD(params, lr=0.5))
    run = rl.Run(tmp_path / "run")
    run.track(policy, optimizer)
    with pytest.raises(RuntimeError, match=r"run\.resume: .* was saved as 'zero3' .*policy\.save_pretrained"):
        run.resume("auto")
