"""The interrupt button of a real Jupyter kernel is a graceful stop."""

import json
import time

import pytest
from waiting import LONG, until

LOOP = """
import rlkit as rl, time
run = rl.Run({folder!r})
for step, batch in run.steps(range(10_000), 10_000, progress=False):
    time.sleep(0.05)
    run.log(step, half=step / 2)
"""


@pytest.mark.slow
def test_interrupt_ends_between_steps_with_everything_saved_and_the_kernel_usable(tmp_path):
    from jupyter_client.manager import start_new_kernel

    folder = tmp_path / "run"
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=LONG)
    try:
        client.execute(LOOP.format(folder=str(folder)))
        until((folder / "timings.jsonl").exists, "the first step")
        time.sleep(0.5)
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=LONG)
        assert reply["content"]["status"] == "ok", reply["content"]  # the cell ended by itself, no traceback

        shown = []
        client.execute_interactive(
            "print(run.stopped, run.step, len(run.metrics))",
            timeout=LONG,
            output_hook=lambda message: shown.append(message["content"].get("text", "")),
        )
        stopped, steps, lines = "".join(shown).split()
        assert stopped == "interrupted"
        assert int(steps) == int(lines) > 0
        assert json.loads((folder / "state.json").read_text())["step"] == int(steps)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
