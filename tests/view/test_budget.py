"""What the view costs: its share of a real loop's time, and the account that keeps it there."""

import threading
import time

import nbclient
import nbformat
import pytest
from folders import write_run
from lab import environment

from rlkit.support import process_state
from rlkit.view import budget as module
from rlkit.view.budget import Budget, seconds_without_a_core
from rlkit.view.dashboard import Dashboard

BOUND = 0.02


class Machine:
    """Clocks that a test moves: of the wall, of this thread, and of the time that the loop's thread got no core."""

    def __init__(self, monkeypatch):
        self.wall = self.thread = self.waited = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.wall)
        monkeypatch.setattr(module.time, "thread_time", lambda: self.thread)
        monkeypatch.setattr(module, "seconds_without_a_core", lambda thread: self.waited if thread else 0.0)
        monkeypatch.setattr(module.process_state, "stepping", [7])

    def look(self, budget, cost):
        with budget:
            self.thread += cost
            self.wall += cost

    def go_on(self, seconds, core):
        """Time passes, of which the loop has a core for a share."""
        self.wall += seconds
        self.waited += seconds * (1 - core)


@pytest.mark.parametrize("cost", [0.001, 0.03, 0.7])
@pytest.mark.parametrize("core", [1.0, 0.2])
def test_a_look_is_paid_for_before_the_next_one(monkeypatch, cost, core):
    """Cheap and dear looks, with a core of one's own and with a fifth of one: a hundredth of what the loop worked."""
    machine = Machine(monkeypatch)
    budget = Budget()
    looks = 0
    for _ in range(20_000):
        machine.go_on(0.5, core)
        if not budget.owes:
            machine.look(budget, cost)
            looks += 1
    worked = 20_000 * 0.5 * core
    assert budget.spent == pytest.approx(looks * cost)
    assert budget.spent <= 0.01 * worked + cost
    if cost > 0.005:  # and it is used, where half a second is not what holds the looks back
        assert budget.spent > 0.009 * worked - cost


def test_a_loop_that_gets_no_core_is_still_looked_at(monkeypatch):
    machine = Machine(monkeypatch)
    budget = Budget()
    machine.look(budget, 0.03)
    machine.go_on(61, 0.0)
    assert not budget.owes  # 100 times 0.03 s at a twentieth of the wall's time


def test_a_long_rest_buys_no_hurry(monkeypatch):
    machine = Machine(monkeypatch)
    budget = Budget()
    machine.go_on(10_000, 1.0)
    machine.look(budget, 0.05)
    machine.go_on(4.0, 1.0)
    assert budget.owes and budget.pause() == pytest.approx(1.0, abs=0.1)
    machine.go_on(1.1, 1.0)
    assert not budget.owes


def test_waiting_for_a_core_is_counted_where_the_system_says_so():
    """The more threads want the cores, the longer one waits; none is waited for by a thread that sleeps."""
    if not seconds_without_a_core(threading.get_native_id()):
        pytest.skip("this system does not say how long a thread waited")
    me = threading.get_native_id()
    before, start, used = seconds_without_a_core(me), time.perf_counter(), time.thread_time()
    while time.thread_time() - used < 0.3:
        pass
    passed, waited = time.perf_counter() - start, seconds_without_a_core(me) - before
    assert waited <= passed and passed - waited < 2 * 0.3  # what is left is what it worked
    assert seconds_without_a_core(None) == 0.0 and seconds_without_a_core(2**22 + 1) == 0.0


def test_a_step_says_in_which_thread_it_goes_on(tmp_path):
    import rlkit as rl

    run = rl.Run(tmp_path / "run")
    seen = [list(process_state.stepping) for _ in run.steps(range(2), 2, progress=False)]
    assert seen == [[threading.get_native_id()]] * 2 and not process_state.stepping
    with pytest.raises(ZeroDivisionError):
        for step, _ in run.steps(range(2), 4, progress=False):
            print(step // 0)
    assert not process_state.stepping


def test_all_work_of_the_view_is_charged(tmp_path):
    """Looks, the picture after a cell and answers to the browser go to one account, each once."""
    dash = Dashboard(write_run(tmp_path / "r", 3), live=True)
    try:
        for work in (
            dash.refresh,
            dash._after_cell,
            lambda: dash.panel.respond({"kind": "table", "limit": 5}),
            lambda: dash.fig.set_state({}),
        ):
            before, start = dash._lock.spent, time.thread_time()
            work()
            assert 0 < dash._lock.spent - before <= time.thread_time() - start, work
    finally:
        dash.close()


SETUP = """
import sys, threading, time, torch
torch.set_num_threads(1)
import rlkit as rl
world = rl.setup(seed=0)
policy = rl.load_policy("tiny-add")
reference = policy.reference()
policy, optimizer = world.prepare(policy, lambda params: torch.optim.AdamW(params, lr=3e-4))
task = rl.tasks.load("addition")
prompts = rl.PromptLoader(task.train, policy, batch_size=32, seed=0)
run = rl.Run("run")
dash = rl.Dashboard(run, live=True)
dash.show()

def loop(steps):
    for step, batch in run.steps(prompts, run.step + steps, progress=False):
        rollout = rl.sample(policy, batch, num_generations=8, max_completion_length=6)
        scores = rl.score(rollout, task.rewards)
        ref_logps = rl.compute_logps(reference, rollout)
        kl = rl.compute_kl(rollout, ref_logps)
        advantages = rl.compute_loo_advantage(scores, kl=kl, beta=0.02)
        update = rl.loss_step(policy, optimizer, rollout, advantages)
        run.log(step, rollout, scores, advantages, update, ref_logps=ref_logps)

def seconds():
    \"\"\"CPU time of the loop's thread, of the view's, and of the one that sends.\"\"\"
    names = {"MainThread", "rlkit-view", "IOPub"}
    clocks = {one.name: time.pthread_getcpuclockid(one.ident) for one in threading.enumerate() if one.name in names}
    return {name: time.clock_gettime(clock) for name, clock in clocks.items()}

looks = []
look = dash.refresh
dash.refresh = lambda: looks.append(threading.current_thread().name) or look()
loop(3)
"""
MEASURE = """
def until_looks(many):
    while looks.count("rlkit-view") < many:
        loop(1)
        assert time.monotonic() < end, looks

end = time.monotonic() + 600
until_looks(2)  # the one that builds the charts, with what it imports, and one more
before, spent = seconds(), dash._lock.spent
until_looks(6)  # from just after one refresh to just after another
used = {name: after - before[name] for name, after in seconds().items()}
print("share", (dash._lock.spent - spent + used["IOPub"]) / used["MainThread"], used)
print("view", used["rlkit-view"] / used["MainThread"])
"""


@pytest.mark.slow
def test_the_view_takes_less_than_a_fiftieth_of_a_real_loop(tmp_path, monkeypatch):
    """The notebook's loop with a live view in a kernel: CPU time of the threads, in one run, on whatever machine.

    What the view did under its lock in any thread, and all that the kernel sent, over what the loop's thread used.
    """
    for name, value in environment(tmp_path / "home").items():
        if name != "HOME":
            monkeypatch.setenv(name, value)
    cells = [nbformat.v4.new_code_cell(text) for text in (SETUP, MEASURE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        store_widget_state=False,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    said = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    found = dict(line.split(" ", 2)[:2] for line in said.splitlines() if line.startswith(("share", "view")))
    assert 0 < float(found["share"]) < BOUND and 0 < float(found["view"]) < BOUND, said
