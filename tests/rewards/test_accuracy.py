"""accuracy: the value of TRL's, the same in every thread, bounded in time, and honest about bad right answers."""

import asyncio
import json
import logging
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from builders import make_rollout
from waiting import LONG

import rlkit as rl
from rlkit.reward_calls.child import Child
from rlkit.rewards import Accuracy, accuracy, check_gold
from rlkit.rewards.math_accuracy import MathProcess, math_process

pytestmark = pytest.mark.integration

CASES = [
    (r"\boxed{\frac{63}{400}}", r"\frac{63}{400}"),
    (r"\boxed{\frac{64}{400}}", r"\frac{63}{400}"),
    (r"so $x = 5$", "5"),
    (r"\boxed{6}", "6"),
    (r"\boxed{7}", "6"),
    ("6", "6"),  # not marked as LaTeX: TRL does not take it
    (r"\boxed{0.5}", r"$\frac{1}{2}$"),
    (r"\boxed{(1,2)}", "$(1,2)$"),
    (r"\boxed{\{1,2\}}", r"$\{2,1\}$"),
    (r"\boxed{5}", "$x=5$"),
    (r"\boxed{x+1}", "$1+x$"),
    ("nothing", "6"),
    ("", "6"),
    (r"\boxed{6}", "no latex"),
    (r"\boxed{6}", ""),
]
WANT_NONE = ("no latex", "")


def columns(cases):
    return [[{"role": "assistant", "content": text}] for text, _ in cases], [gold for _, gold in cases]


def test_the_values_are_trls():
    """The oracle is TRL's own function, in the main thread."""
    from trl.rewards import accuracy_reward

    completions, solution = columns(CASES)
    want = accuracy_reward(completions, solution)
    assert accuracy(completions, solution=solution) == want
    assert [reward is None for reward in want] == [gold in WANT_NONE for gold in solution]
    assert {0.0, 1.0, None} == set(want)


def test_the_last_complete_box_of_the_last_answer_counts():
    """TRL reads two boxes near each other as one answer, {1, 2}, which pays neither."""
    two = r"First \boxed{1}. No wait, \boxed{2}"
    assert accuracy([two] * 3, answer=["1", "2", r"$\{1, 2\}$"]) == [0, 1, 0]
    texts = {
        r"\boxed{1} \boxed{2} so $1$": 1.0,
        r"<answer>\boxed{2}</answer> or <answer>\boxed{1}, \boxed{2}</answer>": 1.0,
        r"\boxed{2}, \boxed{\frac{2}{3}}": 0.0,
        r"\boxed{\boxed{2}}": 1.0,
        r"\boxed{2} and \boxed{3": 1.0,
        r"The answer is $2$, so \boxed{2": 0.0,  # cut
        r"\boxed{}": 0.0,
        r"The answer is $2$. <answer>The answer is $2$": 0.0,
        r"$3$ </think> The answer is $2$": 1.0,
    }
    assert dict(zip(texts, accuracy(list(texts), answer=["2"] * len(texts)), strict=True)) == texts


def test_every_thread_gets_the_same():
    """Main thread, pool, event loop, a thread of its own."""
    completions, solution = columns(CASES[:6])
    main = accuracy(completions, solution=solution)
    assert 1.0 in main and 0.0 in main

    async def awaited():
        return accuracy(completions, solution=solution)

    with ThreadPoolExecutor(4) as pool:
        pooled = list(pool.map(lambda _: accuracy(completions, solution=solution), range(4)))
    found = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(awaited())))
    thread.start()
    thread.join()
    assert pooled == [main] * 4 and asyncio.run(awaited()) == main and found == [main]
    assert threading.current_thread() is threading.main_thread()


def test_gold_comes_first():
    """verify(gold, answer) is not symmetric; math-verify itself says what the two orders give."""
    from math_verify import parse, verify

    pairs = [("x=5", "5"), ("5", "x=5"), ("(1,2)", "1<x<2"), ("1<x<2", "(1,2)"), (r"\{1\}", "1")]
    pairs = [(f"${gold}$", rf"\boxed{{{answer}}}") for gold, answer in pairs]
    orders = [(verify(parse(g), parse(a)), verify(parse(a), parse(g))) for g, a in pairs]
    assert any(right != swapped for right, swapped in orders), "the example shows nothing"
    got = accuracy([a for _, a in pairs], answer=[g for g, _ in pairs])
    assert got == [float(right) for right, _ in orders]


def test_bad_right_answers_abstain_and_are_counted(caplog):
    """None, never 1; '6' is read; how many there are is said up front."""
    golds = ["", None, "6", "no latex", r"\frac{63}{400}", 6]
    assert accuracy([r"\boxed{6}"] * 6, answer=golds) == [None, None, 1, None, 0, 1]
    rows = [{"prompt": "?", "answer": gold} for gold in golds]
    with caplog.at_level(logging.WARNING, logger="rlkit"):
        assert check_gold(rows) == [0, 1, 3]
    assert "check_gold: 3 of 6 rows have a right answer in 'answer' that cannot be read" in caplog.text
    caplog.clear()
    assert check_gold([{"prompt": "?", "gold": "1"}], column="gold") == [] and not caplog.text
    with pytest.raises(ValueError, match="expected a column answer or solution"):
        check_gold([{"prompt": "?"}])


def test_bare_latex_is_a_right_answer():
    r"""DeepMath's final_answer is bare; TRL takes only what its parser finds unmarked, \frac but not \dfrac."""
    golds = [r"\dfrac{1}{2}", r"\sqrt{2}", r"\pi", "no latex"]
    answers = [r"\boxed{0.5}", r"\boxed{\sqrt{2}}", r"\boxed{3}", r"\boxed{1}"]
    assert accuracy(answers, answer=golds) == [1, 1, 0, None]


def test_only_what_comes_after_the_reasoning_counts():
    texts = [r"<think>\boxed{6}</think> \boxed{7}", r"<think>\boxed{7}</think> \boxed{6}", r"<think>\boxed{6}"]
    assert accuracy(texts, answer=["6"] * 3) == [0, 1, 0]


def test_what_was_read_is_logged():
    rollout = make_rollout((2, 2), completions=[r"\boxed{6}", "?"], columns={"answer": ("6", "no latex")})
    scores = rl.score(rollout, accuracy)
    assert scores.names == ("accuracy",) and scores.parts[0, 0] == 1 and scores.parts[1, 0].isnan()
    assert "6" in scores.extra["gold_parsed"][0] and scores.extra["answer_parsed"][1] == "[unparseable]"


# Measured: sympy is kept in one C call by the first, and builds numbers of a gigabyte in the second.
HANGS = [r"\boxed{9^{9^{9^{9}}}+1}", r"\boxed{(10^{10})! + 1}"]


@pytest.mark.slow
@pytest.mark.parametrize("on_timeout", [None, 0.0])
def test_no_expression_hangs_a_run(on_timeout, caplog):
    """Bounded, the chosen value for it, right values around it, no process left over."""
    hanging = Accuracy(timeout=4.0, on_timeout=on_timeout)
    accuracy([r"\boxed{1}"], answer=["1"])  # started
    (judge,) = psutil.Process(math_process.child.pid).children()
    golds = [r"$9^{9^{9^{9}}}+2$", r"$(10^{10})! + 2$"]
    got = hanging([r"\boxed{1}", *HANGS, r"\boxed{1}"], answer=["1", *golds, "1"])  # it comes back: each is bounded
    assert got[0] == got[3] == 1.0 and all(value in (on_timeout, 0.0) for value in got[1:3])
    assert on_timeout in got[1:3] and "math-verify failed on" in caplog.text
    accuracy([r"\boxed{1}"], answer=["1"])
    (other,) = psutil.Process(math_process.child.pid).children()
    assert other != judge and not judge.is_running()  # another one took its place, and it is gone


@pytest.mark.slow
def test_a_call_of_many_that_hang_costs_a_few_timeouts_not_one_for_each(caplog):
    """A policy that has found such an expression writes it everywhere."""
    hanging = Accuracy(timeout=0.8, on_timeout=0.0)
    accuracy([r"\boxed{1}"], answer=["1"])  # started
    hang, gold = HANGS[0], "$9^{9^{9^{9}}}+2$"

    def seconds(count):
        texts = [r"\boxed{1}", *[hang] * count, r"\boxed{1}"]
        start = time.perf_counter()
        assert hanging(texts, answer=["1", *[gold] * count, "1"]) == [1.0, *[0.0] * count, 1.0]
        return time.perf_counter() - start

    one, many = seconds(1), seconds(40)
    assert many < 12 * one  # three, where one after the other it was 40
    assert "math-verify failed on 40 of 42 completions, which get 0.0. The first: took too long" in caplog.text


def test_a_slow_one_gets_more_than_the_quick_round(monkeypatch):
    """By hand: 1 s and 32 parts; the budget is 3 s, and two slow ones have (3 - 2/32) / 2, no more than 1 s, each."""
    asked = []

    def ask(gold, answer, seconds, *, processor_seconds):
        asked.append((answer, processor_seconds))
        enough = {"quick": 0.0, "slow": 0.5, "hangs": 9.0}[answer]
        return {"gold": ["1"], "answer": ["1"], "correct": True} if processor_seconds > enough else {"late": True}

    monkeypatch.setattr(math_process, "ask", ask)
    texts = ["slow", "quick", "hangs", "quick"]
    assert Accuracy(timeout=1.0)(texts, answer=["1"] * 4) == [1.0, 1.0, None, 1.0]
    assert asked == [*((text, 1 / 32) for text in texts), ("slow", 1.0), ("hangs", 1.0)]
    asked.clear()
    assert Accuracy(timeout=1.0)(["hangs"] * 200, answer=["1"] * 200) == [None] * 200
    assert all(share > 0 for _, share in asked) and sum(share for _, share in asked) <= 3.0


def test_the_process_is_there_again_after_it_died():
    accuracy([r"\boxed{1}"], answer=["1"])
    os.kill(math_process.child.pid, 9)
    assert accuracy([r"\boxed{1}", r"\boxed{1}"], answer=["1", "1"])[1] == 1.0


def test_a_worker_ends_itself_if_nobody_is_left_to_end_it():
    """The kernel's timer: it needs neither us nor the interpreter of the worker."""
    process = MathProcess()
    assert process.ask("1", r"\boxed{1}", LONG)["correct"]
    worker = process.child._process
    (child,) = psutil.Process(worker.pid).children()
    for gold in ("1", "$9^{9^{9^{9}}}+2$"):
        bounds = {"seconds": 0.2, "processor_seconds": 60.0}
        worker.stdin.write((json.dumps({"gold": gold, "answer": HANGS[0]} | bounds) + "\n").encode())
    worker.stdin.close()
    assert worker.wait(timeout=LONG) == 0
    assert not child.is_running()
    process.close()


def test_it_can_be_sent_to_another_process():
    again = pickle.loads(pickle.dumps(Accuracy(timeout=3, on_timeout=0.0)))
    assert again == Accuracy(timeout=3, on_timeout=0.0) and again.__name__ == "accuracy"
    assert again([r"\boxed{1}"], answer=["1"]) == [1.0]
    with pytest.raises(ValueError, match="timeout must be above 0"):
        Accuracy(timeout=0)


def test_strange_text_is_judged_too():
    texts = ["\x00", "\ud800", r"\boxed{\ud800}", "<script>", r"\boxed{1}" + "\x00", "\u2028" + r"\boxed{1}"]
    assert accuracy(texts, answer=["1"] * len(texts)) == [0, 0, 0, 0, 1, 1]


def test_an_interrupted_question_does_not_shift_the_answers(monkeypatch):
    """The stop button comes while math-verify thinks: its late answer must not be taken for the next question's."""
    process = MathProcess()
    try:
        assert process.ask("1", r"\boxed{1}", LONG)["correct"]
        monkeypatch.setattr(Child, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.ask("2", r"\boxed{2}", LONG)
        monkeypatch.undo()
        assert [process.ask(gold, r"\boxed{3}", LONG)["correct"] for gold in ("4", "3", "5")] == [False, True, False]
    finally:
        process.close()


def interrupted(self, message, *others):
    self._process.stdin.write(message)
    raise KeyboardInterrupt
