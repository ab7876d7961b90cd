"""Work in other threads, in a process that starts no more of them."""

from __future__ import annotations

from ..lab.processes import run_python

_AT_THE_END = """
import threading
from concurrent.futures import ThreadPoolExecutor
from dcp_tensorizer._runtime.threads import in_background

def save():
    while True:
        try:
            ThreadPoolExecutor(1).submit(int).result()
        except RuntimeError:  # no more threads are started
            break
    print(in_background(lambda: 7).result(), type(in_background(lambda: 1 // 0).exception()).__name__)

threading.Thread(target=save).start()
"""


def test_a_save_that_outlives_the_job_can_still_send_requests() -> None:
    """The interpreter waits for the save's thread but starts no others, so the request runs at once."""
    assert run_python(_AT_THE_END, fresh=True).stdout.split() == ["7", "ZeroDivisionError"]
