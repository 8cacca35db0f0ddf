"""Engines with weights of their own on two processes: the same weights, tokens and small gaps as on one."""

import pytest
import torch
from launching import RANKS

pytestmark = pytest.mark.torchrun
WORKER = "engines_worker.py"
GAP = 1e-4
WEIGHTS = {"rtol": 0.0, "atol": 1e-5}  # after 3 updates, gradients added up in another order


def compare(one, two, kind):
    assert one.code == 0, one.stderr[-3000:]
    assert two.code == 0, two.stderr[-3000:]
    (alone,), ranks = one.check(kind), two.check(kind)
    assert len(ranks) == RANKS and all(rank["ranks"] == RANKS and rank["kept"] for rank in ranks)
    for rank in ranks:
        assert max(rank["gaps"]) < GAP
        assert rank["weights"].keys() == alone["weights"].keys()
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, alone["weights"][name], **WEIGHTS)
    # 3 prompts are shared 2 to 1, one prompt 1 to 0.
    joined = [[row for part in step for row in part] for step in ranks[0]["tokens"]]
    assert [len(row) for row in joined] == [len(row) for row in ([r for p in s for r in p] for s in alone["tokens"])]


@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "full"), ("fsdp2", "full"), ("fsdp2", "lora")])
def test_every_process_hands_the_whole_weights_over(launcher, strategy, kind):
    kinds = {"ddp": ["full"], "fsdp2": ["full", "lora"]}[strategy]
    one = launcher(WORKER, "copy", "full", "lora", ranks=1)
    compare(one, launcher(WORKER, "copy", *kinds, ranks=RANKS, strategy=strategy), kind)


@pytest.mark.vllm
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_vllm_in_every_process(launcher, strategy):
    one, two = (
        launcher(WORKER, "vllm", "full", ranks=1),
        launcher(WORKER, "vllm", "full", ranks=RANKS, strategy=strategy),
    )
    compare(one, two, "full")
