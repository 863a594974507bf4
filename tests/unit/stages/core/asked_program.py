"""Child process that obeys commands on its stdin, such as to hang: `python -m tests.unit.stages.core.asked_program`."""

import os
import re
import subprocess
import sys
import time

from stages.core.program_loop import TimeLimitError, answer_questions, within

MEMORY_BYTES = 1 << 30


def answer(question):
    match question:
        case ["writes", text]:
            os.write(ANSWERS, text.encode())
            time.sleep(1000)
        case ["ends", code]:
            os._exit(code)
        case ["spins"]:
            while True:
                try:
                    while True:
                        pass
                except Exception:
                    pass
        case ["searches", pattern, text]:
            return bool(re.search(pattern, text))
        case ["multiplies"]:
            return 9**9**9
        case ["takes", num_bytes]:
            return len(bytearray(num_bytes))
        case ["descends"]:
            return answer(question)
        case ["raises", text]:
            raise ValueError(text)
        case ["cannot be written"]:
            return object()
        case ["environment"]:
            return dict(os.environ)
        case ["starts", new_session]:
            child = subprocess.Popen(["sleep", "1000"], start_new_session=new_session)
            return [os.getpid(), child.pid]
        case ["each", *limits]:
            return [row(seconds) for seconds in limits]
    return question


def row(seconds):
    """Compute for a number of CPU seconds under a time limit of 0.1 s, and return whether the computation finished."""
    end_s = time.process_time() + seconds

    def work():
        while time.process_time() < end_s:
            pass

    try:
        within(0.1, work)
    except TimeLimitError:
        return False
    return True


def begin():
    if "refuses" in sys.argv:
        raise ImportError("no such library")
    print("what is printed is no answer")
    return answer


if __name__ == "__main__":
    ANSWERS = os.dup(1)
    answer_questions(begin, memory_bytes=MEMORY_BYTES, cpu_s=None if "endless" in sys.argv else 0.25)
