"""A signal's handler that closes the writer returns in time, whatever the main thread was doing."""

import json

from ..lab.processes import run_python

TIMEOUT = 1.0
SLACK = 2.0  # a busy machine's; what held the handler up took 5 s more, or for ever

# Forks a process for each place. There the main thread sends the signal to itself. The handler closes the writer, and
# ends the process.
JOB = """
import json, os, signal, subprocess, sys, threading, time
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._runtime.channel import Channel
from dcp_tensorizer._saving.saver import Saver
from dcp_tensorizer._staging.staged_save import StagedSave
from dcp_tensorizer._staging.saves import StagedSaves
from dcp_tensorizer._staging.tensor_copy import Copies

folder, timeout = sys.argv[1], float(sys.argv[2])

def state(size):
    return {"w": torch.ones(size)}

def save(writer, size=1000):
    return dcp.async_save(state(size), storage_writer=writer)

def signal_in(owner, name):
    # The first time that the main thread is in a function, it gets the signal.
    original, sent = getattr(owner, name), []
    def signalled(*args, **options):
        if threading.current_thread() is threading.main_thread() and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **options)
    setattr(owner, name, signalled)

def suspend(writer):
    os.kill(writer.saver.engine.client._process.pid, signal.SIGSTOP)

def copying(writer):
    signal_in(Copies, "copy_from_host")
    save(writer)

def waiting_for_the_save_before(writer):
    suspend(writer)
    save(writer)
    signal_in(StagedSave, "wait_over")
    save(writer)

def waiting_for_memory(writer):
    allocate, never = os.posix_fallocate, threading.Event()
    os.posix_fallocate = lambda *args: never.wait()
    writer.prewarm(state(1000))
    signal_in(StagedSaves, "wait_prewarmed")
    writer.prewarm(state(2000))

def giving_memory_back(writer):
    save(writer).result()
    writer.saver.engine.saves.wait_turn(writer.saver.stager)
    suspend(writer)
    signal_in(Channel, "answer")  # it has the lock of the requests
    save(writer, 100_000)

def starting_the_process(writer):
    os.kill(writer.saver.engine.client._process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, writer.saver.engine.client._process.pid, os.WEXITED | os.WNOWAIT)
    signal_in(subprocess.Popen, "_execute_child")
    save(writer)

def asking_whether_it_lives(writer):
    signal_in(subprocess.Popen, "_try_wait")  # it has a lock of the standard library's
    signal_in(os, "waitpid")
    save(writer)

def closing(writer):
    suspend(writer)
    save(writer)
    signal_in(StagedSaves, "drain")
    writer.close()

def saving_without_staging(writer):
    class Signalling(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().resolve_data(write_item)
    dcp.save(state(1000), storage_writer=writer, planner=Signalling())

def loading(writer):
    class Signalling(DefaultLoadPlanner):
        def commit_tensor(self, read_item, tensor):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().commit_tensor(read_item, tensor)
    dcp.save(state(1000), storage_writer=writer)
    dcp.load(state(1000), storage_reader=TensorizerStorageReader(writer.checkpoint_id), planner=Signalling())

PLACES = [
    copying, waiting_for_the_save_before, waiting_for_memory, giving_memory_back, starting_the_process,
    asking_whether_it_lives, closing, saving_without_staging, loading,
]

def run(place, told):
    writer = TensorizerStorageWriter(os.path.join(folder, place.__name__))
    writer.saver.engine.client.ensure_process()
    def stop(number, frame):
        started = time.monotonic()
        writer.close(timeout=timeout)
        os.write(told, str(time.monotonic() - started).encode())
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    place(writer)

children = {}
for place in PLACES:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        run(place, write)
        sys.exit(7)
    os.close(write)
    children[pid] = place.__name__, read
seconds = {}
deadline = time.monotonic() + 60
while children and time.monotonic() < deadline:
    for pid in list(children):
        if os.waitpid(pid, os.WNOHANG)[0]:
            name, read = children.pop(pid)
            seconds[name] = float(os.read(read, 100) or "inf")
    time.sleep(0.02)
for pid, (name, read) in children.items():
    seconds[name] = None
    os.kill(pid, signal.SIGKILL)
print(json.dumps(seconds))
"""


def test_a_handler_that_closes_the_writer_returns(tmp_path):
    """In the copy, waiting for a turn or for memory, with each lock that it may hold, in a save and in a load."""
    done = run_python(JOB, tmp_path, TIMEOUT)
    seconds = json.loads(done.stdout)
    assert len(seconds) == 9
    late = {place: value for place, value in seconds.items() if value is None or value > TIMEOUT + SLACK}
    assert late == {}, done.stderr
