"""Systems that lack what most have: /proc, a directory for temporary files, and descriptors that nobody else closes."""

import pytest

from ..lab.processes import can_mount, run_python, run_python_with

NOTHING_IN_PROC = "mount -t tmpfs none /proc"

JOB = """
import os, sys, tempfile
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter

def state(step):
    return {"w": torch.full((100_000,), float(step)), "scalar": torch.tensor(float(step))}

def check(path, step):
    target = state(0)
    dcp.load(target, storage_reader=TensorizerStorageReader(path))
    assert [tensor.unique().tolist() for tensor in target.values()] == [[step], [step]]

path = sys.argv[1]
"""

NO_PROC = """
tempfile.tempdir = "/nowhere"
assert os.listdir("/proc") == []
for staging in ("buffer", "shared"):
    with TensorizerStorageWriter(path, staging=staging) as writer:
        for step in (1, 2):
            state_dict = {key: tensor.share_memory_() for key, tensor in state(step).items()}
            dcp.async_save(state_dict, storage_writer=writer).result()
            assert writer.last_report.attempts == 1
            check(path, step)
print("fine")
"""

# The files that are opened then have the numbers that the buffer, the socket and the process's output had.
CLOSERANGE = """
import signal
from dcp_tensorizer import unwrap
others = os.path.join(path, "others")
os.mkdir(others)

def close_all():
    os.closerange(3, 4096)
    files = [open(os.path.join(others, str(number)), "w+") for number in range(200)]
    for file in files:
        file.write("of somebody else")
        file.flush()
    return files

def intact(files):
    return all(os.pread(file.fileno(), 100, 0) == b"of somebody else" for file in files)

with TensorizerStorageWriter(os.path.join(path, "saved")) as writer:
    dcp.async_save(state(1), storage_writer=writer).result()
    files = close_all()  # between two saves
    dcp.async_save(state(2), storage_writer=writer).result()
    assert writer.last_report.attempts == 1
    check(os.path.join(path, "saved"), 2)
    os.kill(writer.saver.engine.client._process.pid, signal.SIGSTOP)
    future = dcp.async_save(state(3), storage_writer=writer)
    while not writer.saver.engine.client._process._lock.locked():
        pass
    files += close_all()  # in the middle of one, which the writer process has not read yet
    os.kill(writer.saver.engine.client._process.pid, signal.SIGCONT)
    try:
        future.result()
    except BaseException as error:
        assert "cannot be sent to the writer process" in str(unwrap(error)), error
        assert "os.closerange" in str(unwrap(error)), error
    else:
        raise AssertionError("the save did not fail")
    check(os.path.join(path, "saved"), 2)
    dcp.async_save(state(4), storage_writer=writer).result()
    check(os.path.join(path, "saved"), 4)
assert intact(files[200:])
print("fine")
"""

# A program's output would go into a file that takes the number of a closed stream.
NO_STREAMS = """
log = os.fdopen(os.dup2(1, 100), "w")
os.closerange(0, 3)
with TensorizerStorageWriter(os.path.join(path, "saved")) as writer:
    for step in (1, 2):
        future = dcp.async_save(state(step), storage_writer=writer)
        os.system("echo something; echo something >&2")
        future.result()
        assert writer.last_report.attempts == 1
        check(os.path.join(path, "saved"), step)
print("fine", file=log, flush=True)
"""

# Python starts no more threads when the main thread has ended.
LAST = """
import atexit, threading

def save(name):
    with TensorizerStorageWriter(os.path.join(path, name)) as writer:
        dcp.save(state(1), storage_writer=writer)
    check(os.path.join(path, name), 1)
    print("fine", flush=True)

def save_after_the_main_thread():
    threading.main_thread().join()
    save("thread")

atexit.register(save, "atexit")
threading.Thread(target=save_after_the_main_thread).start()
"""


@pytest.mark.promise("no-proc")
@pytest.mark.skipif(not can_mount(NOTHING_IN_PROC), reason="this system lets nobody mount a file system")
def test_neither_proc_nor_a_place_for_temporary_files(tmp_path):
    """Saves and loads work: they only know less of memory, cores and threads."""
    assert run_python_with(NOTHING_IN_PROC, JOB + NO_PROC, tmp_path).stdout == "fine\n"


@pytest.mark.promise("closerange")
def test_a_trainer_that_closes_all_descriptors(tmp_path):
    """A save in progress fails, the next one succeeds, and no file that takes a closed number is used or closed."""
    assert run_python(JOB + CLOSERANGE, tmp_path, fresh=True).stdout == "fine\n"


def test_a_trainer_without_standard_streams(tmp_path):
    """Saves of a program that has closed its standard streams work at the first attempt."""
    assert run_python(JOB + NO_STREAMS, tmp_path, fresh=True).stdout == "fine\n"


def test_the_last_save_of_a_program(tmp_path):
    """By a handler of `atexit`, and by a thread that outlives the main thread."""
    assert run_python(JOB + LAST, tmp_path, fresh=True).stdout == "fine\nfine\n"
