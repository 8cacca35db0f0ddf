"""Rewards in a real Jupyter kernel: its loop is running, its functions live in `__main__`, its button interrupts."""

import sys
from pathlib import Path

import pytest
from waiting import LONG, until

from rlkit.run.lock import lives

SET_UP = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import asyncio, re, time
from builders import make_rollout, worker_pids
import rlkit as rl
rollout = make_rollout((1, 1, 1), completions=("ab", "bad", "b"))
PATTERN = re.compile("b")
def helper(text):
    return float(len(PATTERN.findall(text)))
class Judge:
    async def __call__(self, completions):
        await asyncio.sleep(0.01)
        return [helper(text) for text in completions]
def hangs(completions):
    for text in completions:
        while text == "bad":
            open({{BEGUN!r}}, "a").close()
    return [helper(text) for text in completions]
"""


@pytest.mark.slow
def test_rewards_of_a_notebook(tmp_path):
    """Async twice in a row beside the running loop; a hanging function is killed; the stop button works."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=LONG)
    shown = []

    def run(code, timeout=LONG):
        shown.clear()
        reply = client.execute_interactive(
            code, timeout=timeout, output_hook=lambda message: shown.append(message["content"].get("text", ""))
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(shown)

    try:
        run(SET_UP.replace("{BEGUN!r}", repr(str(tmp_path / "begun"))))
        assert "True" in run("print(asyncio.get_running_loop().is_running())")
        for _ in range(2):
            assert "[1.0, 1.0, 1.0]" in run("print(rl.score(rollout, Judge()).reward.tolist())")
        text = run("print(rl.score(rollout, [hangs, Judge()], timeout={'hangs': 4.0}).parts.T.tolist())")
        assert "[[1.0, nan, 1.0], [1.0, 1.0, 1.0]]" in text and "runs in a thread" not in text

        (tmp_path / "begun").unlink()  # of the call before, whose process was killed
        client.execute("rl.score(rollout, hangs, timeout=3600.0)")
        until((tmp_path / "begun").exists, "the call")
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=LONG)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert "[1.0, nan, 1.0]" in run("print(rl.score(rollout, hangs, timeout=4.0).reward.tolist())")
        pids = [int(word) for word in run("print(*worker_pids())").split() if word.isdigit()]
        assert pids
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    if sys.platform == "linux":
        until(lambda: not any(map(lives, pids)), "the end of the workers")
