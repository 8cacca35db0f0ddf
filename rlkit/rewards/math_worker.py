"""The process in which math-verify runs: one JSON line in, one out. Started by `math_accuracy`, with nothing of rlkit.

math-verify bounds its time by signal.alarm, which works in a main thread only, and some expressions
keep sympy in one C call for ever. Here its timeouts are off, and the kernel ends the process that judges, by timers
whose signals have no handler, even if the asking process has ended.

That process is a child of this one, which has only imported what it needs. To import sympy takes seconds, to fork
again after an expression that hung takes milliseconds.
"""

import functools
import json
import logging
import os
import re
import resource
import signal

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

MEMORY = 4 << 30  # bytes
LATEX_COMMAND = re.compile(r"\\[A-Za-z]")


@functools.lru_cache(maxsize=4096)
def parse_gold(text):
    """Every reading of a right answer. Bare LaTeX, as DeepMath has it, is read as if it were marked."""
    found = parse(text, parsing_timeout=None)
    if not found and "$" not in text and LATEX_COMMAND.search(text):
        found = parse(f"${text}$", parsing_timeout=None)
    return found


def parse_answer(text):
    """The answer in a completion, as TRL reads it: LaTeX that is marked as such, a box first."""
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    return parse(text, extraction_config=[config], extraction_mode="first_match", parsing_timeout=None)


def judge(job):
    """Parse the gold; with an answer, compare the two."""
    gold = parse_gold(job["gold"])
    if not gold or job["answer"] is None:
        return {"gold": [str(one) for one in gold], "answer": None, "correct": None}
    answer = parse_answer(job["answer"])
    correct = verify(gold=gold, target=answer, timeout_seconds=None)  # not symmetric
    return {"gold": [str(one) for one in gold], "answer": [str(one) for one in answer], "correct": bool(correct)}


def lines():
    """The lines that come in. Unbuffered: what a child has read ahead would be lost with it."""
    unread = b""
    while piece := os.read(0, 1 << 16):
        unread += piece
        while b"\n" in unread:
            line, _, unread = unread.partition(b"\n")
            yield line


def say(answer):
    """One line out."""
    os.write(1, answer.encode() + b"\n")


def serve():
    """Answer line by line until there is no more, or until an answer takes too long."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in lines():
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        signal.setitimer(signal.ITIMER_PROF, job["processor_seconds"])
        try:
            answer = judge(job)
        except Exception as error:  # sent as the answer
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(json.dumps(answer))


def main():
    """A child that serves, and after its death the next one."""
    logging.disable(logging.WARNING)  # "timeout is disabled", once per expression
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    judge({"gold": "1", "answer": r"\boxed{1}"})  # what is imported late, and the parser, before the first child
    say("ready")
    while True:
        child = os.fork()
        if not child:
            serve()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not status:
            return
        say(json.dumps({"late": status in (-signal.SIGALRM, -signal.SIGPROF), "error": f"its process ended: {status}"}))


if __name__ == "__main__":
    main()
