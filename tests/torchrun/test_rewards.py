"""Rewards on several processes: whole groups, joined metrics, and no hang where one rank's function fails."""

import json

import pytest
import torch

pytestmark = pytest.mark.torchrun


def lines(launch):
    return [json.loads(line) for line in (launch.folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_score_as_one(launcher):
    """A rank within the group is right on every rank, since groups are whole; counts and means are of all rows."""
    one, two = (launcher("rewards_worker.py", "share", ranks=ranks) for ranks in (1, 2))
    assert (one.code, two.code) == (0, 0), one.stderr[-3000:] + two.stderr[-3000:]
    (alone,), both = one.check("share"), two.check("share")
    assert [each["rows"] for each in both] == [12, 8] and alone["rows"] == 20
    assert both[0]["texts"] + both[1]["texts"] == alone["texts"]
    for each in both:
        torch.testing.assert_close(each["parts"], alone["parts"], equal_nan=True, rtol=0, atol=0)
        assert each["failures"] == alone["failures"] and any(alone["failures"])
        assert each["metrics"].keys() == alone["metrics"].keys()
        for name, value in alone["metrics"].items():
            assert each["metrics"][name] == pytest.approx(value, rel=1e-6), name
    for (found,), (wanted,) in [(lines(two), lines(one))]:
        assert found.keys() == wanted.keys()
        for name in (
            "reward",
            "judged",
            "rewards/picky/errors",
            "rewards/rank_in_group/timeouts",
            "rewards/picky/mean",
        ):
            assert found[name] == pytest.approx(wanted[name], rel=1e-6), name


def test_the_rank_within_a_group_is_the_one_counted_by_hand(launcher):
    (alone,) = launcher("rewards_worker.py", "share", ranks=1).check("share")
    groups, texts = alone["group_id"].tolist(), alone["texts"]
    groups_of = {g: [text for text, h in zip(texts, groups, strict=True) if h == g] for g in groups}
    want = [sum(len(t) < len(own) for t in groups_of[g]) for own, g in zip(texts, groups, strict=True)]
    assert alone["parts"][:, 0].tolist() == want and max(want) > 0


@pytest.mark.parametrize("way", ["process", "async"])
def test_a_function_that_fails_on_one_rank_ends_both(launcher, way):
    """From a subprocess and from the event loop too."""
    found = launcher("rewards_worker.py", "broken", way, ranks=2)
    assert found.code != 0 and "it hangs" not in found.stderr
    assert len(found.json("begun")) == 2 and not list(found.folder.glob("ended*"))
    assert "rlkit: rank 0 stops because rank 1 failed:" in found.stderr
    assert "the judge of rank 1 is broken" in found.stderr
