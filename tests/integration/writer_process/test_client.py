"""The trainer's side of the writer process: requests, deaths, hangs, ends."""

import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest
import torch
from tensorizer import TensorDeserializer

from dcp_tensorizer._runtime.channel import Channel
from dcp_tensorizer._runtime.child import interpreter
from dcp_tensorizer._staging.shared_memory import SharedBuffer
from dcp_tensorizer._tensor_file.names import data_file_name
from dcp_tensorizer._writer_process.client import Unsendable, WriterProcess
from dcp_tensorizer._writer_process.options import SaveOptions
from dcp_tensorizer._writer_process.protocol import (
    DeviceTensor,
    FileRequest,
    SnapshotRequest,
    TensorSource,
    WriteRequest,
)
from dcp_tensorizer.errors import WriteError, WriterProcessDied

from ...lab.processes import kill, open_descriptors
from ...lab.waiting import WAIT

NAME = data_file_name(0, 0, "a" * 32)


class Foreign:
    """A class that the writer process cannot import."""


@pytest.fixture
def buffer():
    buffer = SharedBuffer(1 << 20)
    yield buffer
    buffer.close()


@pytest.fixture(scope="module")
def processes():
    started = []
    yield started
    for process in started:
        process.close()


@pytest.fixture
def process(processes):
    """Returns a running process: the previous test's, or a new one if that has ended."""
    if not processes or not processes[-1].alive:
        processes.append(WriterProcess())
    return processes[-1]


def request(path, buffer, count=1000, options=None):
    tensor = buffer.allocate(torch.float32, (count,))
    tensor.copy_(torch.arange(count, dtype=torch.float32))
    source = TensorSource("w", "float32", (count,), tensor.nbytes, "tensor", buffer.id, buffer.locate(tensor))
    return WriteRequest(
        str(path), SaveOptions(storage_options=options or {}, thread_count=2), (FileRequest(NAME, (source,)),)
    )


def test_requests_are_written(process, buffer, tmp_path):
    """Two requests with one buffer write the tensor; the second request sends no descriptor."""
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        buffer.reset()
        done = process.ask(request(folder, buffer), [buffer], 60)
        assert [file.name for file in done.files] == [NAME]
        assert done.files[0].nbytes == (folder / NAME).stat().st_size
        place = done.files[0].tensors[0]
        assert (place.length, len(place.digests)) == (4000, 8)
        with TensorDeserializer(str(folder / NAME), verify_hash=True, device="cpu") as stock:
            assert torch.equal(stock["w"].data, torch.arange(1000, dtype=torch.float32))


def test_a_failed_request_leaves_no_file(process, buffer, tmp_path):
    """The error names the path, has the process's traceback as its cause, and the next request succeeds."""
    with pytest.raises(WriteError, match="nowhere") as caught:
        process.ask(request(tmp_path / "nowhere", buffer), [buffer], 60)
    assert "Traceback" in str(caught.value.__cause__)
    buffer.reset()
    process.ask(request(tmp_path, buffer), [buffer], 60)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_storage_options_that_cannot_be_understood(process, buffer, tmp_path):
    """A class that the writer process cannot import fails the request, and the process continues."""
    options = {"option": Foreign()}
    Foreign.__module__ = "an_unknown_module"
    sys.modules["an_unknown_module"] = sys.modules[__name__]
    try:
        with pytest.raises(WriteError, match="an_unknown_module"):
            process.ask(request(tmp_path, buffer, options=options), [buffer], 60)
    finally:
        del sys.modules["an_unknown_module"]
    assert process.alive


def test_storage_options_that_cannot_be_sent(process, buffer, tmp_path):
    """The error names storage_options, nothing is sent, and the next request succeeds."""
    with pytest.raises(Unsendable, match=r"storage_options cannot be sent.*TypeError: cannot pickle '_thread.lock'"):
        process.ask(request(tmp_path, buffer, options={"option": threading.Lock()}), [buffer], 60)
    assert process.alive
    assert list(tmp_path.iterdir()) == []
    buffer.reset()
    process.ask(request(tmp_path, buffer), [buffer], 60)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_buffer_that_never_arrived_is_sent_again(process, buffer, tmp_path):
    """After a request that failed before its buffers were attached, the next request sends them again."""
    Foreign.__module__ = "an_unknown_module"
    sys.modules["an_unknown_module"] = sys.modules[__name__]
    try:
        with pytest.raises(WriteError, match="an_unknown_module"):
            process.ask(request(tmp_path, buffer, options={"option": Foreign()}), [buffer], 60)
    finally:
        del sys.modules["an_unknown_module"]
    buffer.reset()
    process.ask(request(tmp_path, buffer), [buffer], 60)
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 2, "signal 36")])
def test_death_is_noticed(process, buffer, tmp_path, number, name):
    """A killed process is not alive, and a request to it raises WriterProcessDied, which names the signal."""
    os.kill(process.pid, number)
    with pytest.raises(WriterProcessDied, match=name):
        process.ask(request(tmp_path, buffer), [buffer], 60)
    assert not process.alive


def test_death_in_the_middle_of_a_request_is_noticed(process, buffer, tmp_path):
    """If the process is killed during a request, WriterProcessDied is raised at once, without a cause."""
    process.ask(request(tmp_path, buffer), [buffer], 60)
    os.kill(process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    buffer.reset()
    with pytest.raises(WriterProcessDied) as caught:
        process.ask(request(tmp_path, buffer), [buffer], 60)
    killer.join()
    assert str(caught.value) == f"the writer process (pid {process.pid}) was killed by SIGKILL"


def test_a_process_that_takes_no_request_is_killed(process, buffer, tmp_path):
    """The timeout also applies to sending a request that exceeds the socket's buffer."""
    process.ask(request(tmp_path, buffer), [buffer], 60)
    os.kill(process.pid, signal.SIGSTOP)
    rescue = threading.Timer(20, os.kill, (process.pid, signal.SIGKILL))
    rescue.start()
    source = TensorSource("w" * 200, "float32", (1,), 4, "tensor", buffer.id, 0)
    padded = SaveOptions(storage_options={"padding": os.urandom(4 << 20)}, thread_count=1)
    large = WriteRequest(str(tmp_path), padded, (FileRequest(NAME, (source,) * 20_000),))
    try:
        with pytest.raises(WriterProcessDied, match="made no progress for 1 s"):
            process.ask(large, [buffer], 1)
    finally:
        rescue.cancel()
    assert not process.alive


def test_warnings_as_errors_do_not_keep_it_from_starting(buffer, tmp_path, monkeypatch):
    """PYTHONWARNINGS=error in the trainer's environment does not fail the start."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    process = WriterProcess()
    try:
        process.ask(request(tmp_path, buffer), [buffer], 60)
    finally:
        process.close()
    assert (tmp_path / NAME).exists()


def test_a_process_that_hangs_is_killed(process, buffer, tmp_path):
    """After the timeout without progress, the process is killed, and the error says so."""
    process.ask(request(tmp_path, buffer), [buffer], 60)
    os.kill(process.pid, signal.SIGSTOP)
    buffer.reset()
    with pytest.raises(WriterProcessDied, match="made no progress for 2 s"):
        process.ask(request(tmp_path, buffer), [buffer], 2)
    assert not process.alive


@pytest.mark.parametrize("when", ["at work", "starting"])
def test_signals_of_the_job_are_the_trainers(buffer, tmp_path, when):
    """Signals that terminals and schedulers send to all processes of a job do not end the writer process."""
    process = WriterProcess()
    if when == "at work":
        process.ask(request(tmp_path, buffer), [buffer], 60)
        (tmp_path / NAME).unlink()
        buffer.reset()
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "TSTP", "XCPU"):
        os.kill(process.pid, getattr(signal, f"SIG{name}"))
    process.ask(request(tmp_path, buffer), [buffer], 60)
    assert (tmp_path / NAME).exists()
    process.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_an_answer_that_stops_half_way(process, buffer, tmp_path, monkeypatch):
    """The timeout also applies in the middle of an answer."""
    receive = Channel._read

    def stop_first(channel, count, wait):
        os.kill(process.pid, signal.SIGSTOP)
        ours = channel._sock
        while True:  # what has arrived of the answer is lost
            try:
                ours.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return receive(channel, count, wait)

    monkeypatch.setattr(Channel, "_read", stop_first)
    with pytest.raises(WriterProcessDied, match="made no progress for 2 s"):
        process.ask(request(tmp_path, buffer), [buffer], 2)
    assert not process.alive


def test_closing_twice(process):
    """`close` ends the process, and a second call does nothing."""
    pid = process.pid
    process.close()
    process.close()
    assert not process.alive
    assert not psutil.pid_exists(pid)


def test_nothing_secret_in_the_process_list(process, buffer, tmp_path):
    """The command line contains only the interpreter's arguments, the module and three numbers."""
    process.ask(request(tmp_path, buffer, options={"secret": "hunter2-secret"}), [buffer], 60)
    command = psutil.Process(process.pid).cmdline()
    assert command[:-3] == [*interpreter(), "dcp_tensorizer._writer_process.worker"]
    assert all(argument.lstrip("-").isdigit() for argument in command[-3:])


def test_no_gpu_and_low_priority(process, buffer, tmp_path):
    """The process sees no GPU, and has a lower priority than training."""
    process.ask(request(tmp_path, buffer), [buffer], 60)
    seen = psutil.Process(process.pid)
    assert seen.environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert seen.nice() == min(19, psutil.Process().nice() + 7)


def test_it_ends_with_its_trainer():
    """An idle writer process ends with its killed trainer, even if a forked child holds the socket."""
    script = textwrap.dedent(
        """
        import os, sys, signal
        from dcp_tensorizer._writer_process.client import WriterProcess
        process = WriterProcess()
        child = os.fork()
        if child == 0:
            signal.pause()
        print(process.pid, child, flush=True)
        signal.pause()
        """
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    writer, forked = (psutil.Process(int(pid)) for pid in trainer.stdout.readline().split())
    try:
        trainer.kill()
        gone, _ = psutil.wait_procs([writer], timeout=600)
        assert [p.pid for p in gone] == [writer.pid]
    finally:
        forked.kill()
        trainer.wait()
        trainer.stdout.close()
        psutil.wait_procs([forked], timeout=600)


def test_started_from_several_threads(tmp_path):
    """Several threads of a trainer can start processes at the same time."""
    buffers = [SharedBuffer(1 << 16) for _ in range(2)]
    processes = [WriterProcess() for _ in range(2)]
    folders = [tmp_path / str(number) for number in range(2)]

    def write(number):
        folders[number].mkdir()
        processes[number].ask(request(folders[number], buffers[number]), [buffers[number]], 60)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for buffer, process in zip(buffers, processes, strict=True):
        process.close()
        buffer.close()
    assert all((folder / NAME).exists() for folder in folders)


def test_a_snapshot_that_cannot_be_taken_is_an_error_and_no_more(buffer, tmp_path):
    """Without a GPU the snapshot fails, and the process serves the next request with its attached buffers."""
    process = WriterProcess(devices=True)
    handle = ((torch.Tensor, "no handle"),)
    wrong = SnapshotRequest(buffer.id, 0, handle, (DeviceTensor(0, "float32", (3,), (1,), 0, False, False, 0),))
    try:
        with pytest.raises(WriteError):
            process.ask(wrong, [buffer], 60)
        buffer.reset()
        process.ask(request(tmp_path, buffer), [buffer], 60)
    finally:
        process.close()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_process_that_may_use_gpus_sees_the_trainers(monkeypatch, buffer, tmp_path):
    """A process that may use GPUs has the trainer's CUDA_VISIBLE_DEVICES."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    process = WriterProcess(devices=True)
    try:
        process.ask(request(tmp_path, buffer), [buffer], 60)  # it has started
        assert psutil.Process(process.pid).environ()["CUDA_VISIBLE_DEVICES"] == "3,5"
    finally:
        process.close()


def mapped(process):
    """Returns the inodes of the trainer's buffers that the process has mapped."""
    with open(f"/proc/{process.pid}/maps", encoding="ascii") as maps:
        return {int(line.split()[4]) for line in maps if "memfd:dcp_tensorizer" in line}


def test_a_buffer_that_is_given_back_is_free(process, tmp_path):
    """The process unmaps a closed buffer at once, and retains others."""
    kept, given_back = SharedBuffer(1 << 20), SharedBuffer(1 << 20)
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    process.ask(request(tmp_path / "1", kept), [kept, given_back], 60)
    inode = os.fstat(kept.fd).st_ino
    assert len(mapped(process)) == 2
    given_back.close()
    assert mapped(process) == {inode}
    kept.reset()
    process.ask(request(tmp_path / "2", kept), [kept], 60)
    assert mapped(process) == {inode}
    kept.close()
    assert mapped(process) == set()


def test_giving_back_the_buffer_of_a_dead_process_is_no_error(processes, tmp_path):
    """Closing the buffer of a dead process raises nothing."""
    process = WriterProcess()
    processes.append(process)
    buffer = SharedBuffer(1 << 20)
    process.ask(request(tmp_path, buffer), [buffer], 60)
    kill(psutil.Process(process.pid))
    buffer.close()
    assert not process.alive
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(buffer.fd)


def test_after_a_failed_request_a_buffer_that_is_given_back_is_free_too(process, tmp_path):
    """A buffer of a failed request, which the process may have attached, is unmapped when it is closed."""
    buffer = SharedBuffer(1 << 20)
    with pytest.raises(WriteError):
        process.ask(request(tmp_path / "nowhere", buffer), [buffer], 60)
    buffer.close()
    assert mapped(process) == set()


def test_an_interrupted_request_ends_the_process(processes, buffer, tmp_path, monkeypatch):
    """An interrupted request ends the process, so that its answer is not taken for that of the next request."""
    process = WriterProcess()
    processes.append(process)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.ask(request(tmp_path, buffer), [buffer], 60)
    assert not process.alive
    buffer.reset()
    with pytest.raises(WriterProcessDied):
        process.ask(request(tmp_path, buffer), [buffer], 60)


def test_a_process_that_cannot_be_started(monkeypatch):
    """If the process cannot be started, the error has the reason, and no descriptor stays open."""

    def refuse(*args, **options):
        raise OSError(errno.EMFILE, "Too many open files")

    before = open_descriptors()
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(WriterProcessDied, match=r"cannot be started.*Too many open files"):
        WriterProcess()
    assert open_descriptors() == before


def test_a_kernel_without_pidfds(monkeypatch, buffer, tmp_path):
    """Without pidfds, as before Linux 5.3 and in some sandboxes, the process works."""

    def refuse(pid):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    process = WriterProcess()
    try:
        assert process.ask(request(tmp_path, buffer), [buffer], 60).files[0].name == NAME
    finally:
        process.close()


def test_a_process_that_cannot_be_killed_is_given_up(processes, buffer, tmp_path, monkeypatch):
    """A process that hangs in the kernel gets no other request, and closing it does not hang."""
    process = WriterProcess()
    processes.append(process)
    popen = process._popen
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(popen, "send_signal", lambda number: None)
        with pytest.raises(WriterProcessDied, match="made no progress for 1 s"):
            process.ask(request(tmp_path, buffer), [buffer], 1)
        assert popen.poll() is None
        assert not process.alive
        process.close()
    popen.kill()
    assert popen.wait(WAIT) == -signal.SIGKILL
