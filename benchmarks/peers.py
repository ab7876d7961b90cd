"""Copies on other hosts: their cost while nothing fails, and the time in which a rank loads a state from another host,
when it restarts or joins as a replica of torchft.

``python -m benchmarks.peers`` (about 4 minutes), as root. The two hosts are namespaces of this machine. The network
between them is as fast as its memory. Beside each figure is that of raw sockets in the same run, with as many streams,
the same bytes and the same rate, but without digests and encryption. For a restart and a healing there is also a figure
of raw sockets with the same cipher at both ends, and a digest of each byte: on this machine no transfer that is
encrypted and verified can be faster.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import xxhash

from dcp_tensorizer import CheckpointManager, CopyOptions
from dcp_tensorizer._memory.checkpoint import _STREAMS
from dcp_tensorizer._memory.copies import DEFAULT_RATE
from dcp_tensorizer._memory.frames import FRAME_MAC_BYTES, FrameCipher, FrameCipherKind, frame_ciphers
from dcp_tensorizer._memory.protocol import CopyStatus, Plain
from dcp_tensorizer._memory.replicas import Throttle
from dcp_tensorizer._memory.wire import MAX_BYTES
from dcp_tensorizer._runtime.threads import cores
from dcp_tensorizer.integrations.torchft import TensorizerTransport
from tests.hosts.lab import SHARED, Lab
from tests.hosts.requirements import missing

from .case import Case, quiet
from .harness import Content, Spread, cell, quotient, run, run_cases, spread, table, whole
from .pages import Goal, goals, page

_TENSORS = 100
_SURVIVE = 120.0
_SAVES = 8
_EVERY = 2.0  # seconds between two saves
_SECONDS = 300.0
_PORT = 4711
_PIECE = 1 << 20
_COSTS = ("copies=1", "copies=2", "copies=1, and raw sockets")
_SEALED = "raw sockets, with the same cipher and a digest"
_RESTARTS = ("from a peer", "raw sockets", _SEALED)
_HEALING = ("healing", "raw sockets", _SEALED)
_WHAT = (
    "what it costs to copy each state to another host while nothing fails, and how long a rank takes to load a state "
    "from there. Two hosts, one rank each; both are namespaces of one machine, and share its cores."
)


def measure(options: argparse.Namespace, folder: Path) -> Content:
    if (reason := missing()) is not None:
        print(f"not measured: {reason}", file=sys.stderr)
        raise SystemExit(0)
    base = {"gib": options.gib, "folder": str(folder)}
    results = run_cases(cost, [{"what": kind, **base} for kind in _COSTS], options.rounds)
    results += run_cases(restart, [{"what": "restart", **base}], options.rounds)
    results += run_cases(healing, [{"what": "healing", **base}], options.rounds)
    return {"gib": options.gib, "rounds": options.rounds, "results": whole(results)}


def _state(gib: float, value: float) -> dict[str, torch.Tensor]:
    rank, elements = dist.get_rank(), _elements(gib)
    return {f"t{rank}.{n}": torch.full((elements,), value) for n in range(_TENSORS)}


def _elements(gib: float) -> int:
    return int(gib * 2**30 / 4 / _TENSORS)


def _state_of_lost(gib: float, value: float) -> dict[str, torch.Tensor]:
    """Returns a state for the rank whose host is lost; for the other rank, a tiny one whose load takes no cores."""
    return _state(gib if dist.get_rank() else 0.001, value)


def _begin() -> int:
    quiet()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_SECONDS))
    return dist.get_rank()


def _tell(name: str, words: object) -> None:
    (SHARED / f"{name}.tmp").write_text(json.dumps(words))
    (SHARED / f"{name}.tmp").rename(SHARED / name)


# --- what copies cost -------------------------------------------------------------------------------------------------


def cost(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Returns each rank's stalls, seconds until durable, steps per second, CPU time of its host, and sent bytes."""
    missing()  # a mount namespace of its own
    with Lab(folder / "lab") as lab:
        hosts = lab.hosts(2)
        job = lab.forked(hosts, trainer, case, [host.address for host in hosts])
        assert job.wait(_SECONDS) == [0, 0], job.account()
        return [json.loads((lab.shared / f"cost-{rank}").read_text()) for rank in range(2)]


def trainer(case: Case, addresses: Sequence[str]) -> None:
    """Trains and saves; with raw sockets, sends as many bytes after each save as a copy has."""
    rank = _begin()
    state, copies = _state(case["gib"], 0.0), 2 if case["what"] == "copies=2" else 1
    sender = _RawSender(addresses, rank) if "raw" in case["what"] else None
    stalls, durable, steps = list[float](), list[float](), 0
    matrix = torch.rand(256, 256)
    with CheckpointManager(SHARED / "run", survive=_SURVIVE, copies=copies, keep_latest=1, stop_signals=()) as manager:
        for step in range(_SAVES):
            if step == 2:  # the staging buffers are allocated
                began, steps, cpu, sent = time.perf_counter(), 0, _cpu(), _sent()
            for tensor in state.values():
                tensor += 1
            started = time.perf_counter()
            future = manager.save(step, state, force=True)
            stalls.append(time.perf_counter() - started)
            assert future is not None
            future.add_done_callback(lambda _, started=started: durable.append(time.perf_counter() - started))  # type: ignore[misc]
            if sender is not None:
                sender.send(sum(tensor.nbytes for tensor in state.values()))
            while time.perf_counter() - started < _EVERY:
                matrix = matrix @ matrix / 256
                steps += 1
        seconds = time.perf_counter() - began
        measured = {"speed": steps / seconds, "cpu": (_cpu() - cpu) / (_SAVES - 2), "sent": (_sent() - sent)}
        manager.wait()
    figures = {"stalls": stalls[2:], "durable": durable[2:], "sent": measured["sent"] / (_SAVES - 2)}
    _tell(f"cost-{rank}", measured | figures)
    dist.barrier()
    dist.destroy_process_group()


def _cpu() -> float:
    """Returns the CPU seconds of all processes of this host."""
    found = 0.0
    for process in psutil.process_iter(["cpu_times"]):
        if (times := process.info["cpu_times"]) is not None:
            found += times.user + times.system
    return found


def _sent() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


class _RawSender:
    """A process of low priority that sends zeros to the other host at the default rate, and receives its zeros."""

    def __init__(self, addresses: Sequence[str], rank: int) -> None:
        listener = socket.create_server((addresses[rank], _PORT))
        dist.barrier()
        self._orders, orders = os.pipe()[::-1]
        if os.fork() == 0:
            try:
                os.close(self._orders)
                os.nice(10)
                target = socket.create_connection((addresses[1 - rank], _PORT))
                with ThreadPoolExecutor(2) as pool:
                    pool.submit(_discard, listener.accept()[0])
                    _obey(orders, target)
            finally:
                os._exit(0)
        os.close(orders)
        listener.close()

    def send(self, nbytes: int) -> None:
        os.write(self._orders, nbytes.to_bytes(8, "little"))


def _obey(orders: int, target: socket.socket) -> None:
    throttle, piece = Throttle(DEFAULT_RATE), bytes(_PIECE)
    while order := os.read(orders, 8):
        for _ in range(0, int.from_bytes(order, "little"), _PIECE):
            throttle.wait(_PIECE)
            target.sendall(piece)


def _discard(source: socket.socket) -> None:
    room = bytearray(_PIECE)
    while source.recv_into(room):
        pass


# --- a restart --------------------------------------------------------------------------------------------------------


def restart(case: Case, folder: Path) -> dict[str, float]:
    """Returns the seconds in which a rank on a new host restores from the other host, and those of raw sockets."""
    missing()
    with Lab(folder / "lab") as lab:
        here, there = lab.hosts(2)
        job = lab.forked([here, there], copied, case)
        job.until(lambda: all((lab.shared / f"copied-{rank}").exists() for rank in range(2)), _SECONDS)
        there.die()
        job.end()
        job = lab.forked([here, lab.host()], restored, case, here.address)
        assert job.wait(_SECONDS) == [0, 0], job.account()
        found: dict[str, float] = json.loads((lab.shared / "restored-1").read_text())
        return found


def copied(case: Case) -> None:
    """Saves a step, and waits until it is copied and the host is lost."""
    rank = _begin()
    state = _state_of_lost(case["gib"], 1.0)
    manager = CheckpointManager(
        SHARED / "run",
        save_every=1000,
        survive=_SURVIVE,
        survive_every=1,
        copies=2,
        copy_options=CopyOptions(rate=None),
        stop_signals=(),
    )
    survival = manager._survival
    for step in range(1, 1000):
        for tensor in state.values():
            tensor.fill_(step)
        manager.save(step, state, force=step == 1, wait=step == 1)
        survival.wait_held()
        keeper = survival._keeper
        while survival.copies.ordered and keeper is not None and keeper.ask(Plain.COPY_STATUS, CopyStatus).is_running:
            time.sleep(0.01)
        if survival.copies.confirmed:
            break
    assert survival.copies.confirmed
    _tell(f"copied-{rank}", step)
    time.sleep(_SECONDS)


def restored(case: Case, address: str) -> None:
    """Restores; then the rank on the new host receives as many bytes by raw sockets."""
    rank = _begin()
    state = _state_of_lost(case["gib"], 0.0)
    manager = CheckpointManager(SHARED / "run", survive=_SURVIVE, copies=2, stop_signals=())
    dist.barrier()
    began, started = _cpu(), time.perf_counter()
    step = manager.restore(state)
    seconds = time.perf_counter() - started
    cpu = _cpu() - began
    assert step is not None and step > 1 and all(float(tensor[-1]) >= step - 1 for tensor in state.values())
    measured = {"from a peer": seconds, "cpu": cpu}
    streams, nbytes = max(cores(), _STREAMS), 4 * _TENSORS * _elements(case["gib"])
    listener, memory = socket.create_server((address, _PORT)) if rank == 0 else None, _memory(nbytes // streams)
    for name, give, get in (("raw sockets", _give, _get), (_SEALED, _give_sealed, _get_sealed)):
        dist.barrier()
        if listener is not None:
            _serve_raw(listener, memory, streams, give)
        else:
            measured[name] = _raw_seconds(address, nbytes, streams, get)
    if rank:
        _tell("restored-1", measured)
    dist.barrier()
    os._exit(0)


_Carry = Callable[[socket.socket, memoryview], object]


def _serve_raw(listener: socket.socket, memory: memoryview, streams: int, give: _Carry) -> None:
    def serve(number: int) -> None:
        with listener.accept()[0] as target:
            give(target, memory)

    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(serve, range(streams)))


def _raw_seconds(address: str, nbytes: int, streams: int, get: _Carry) -> float:
    memory = _memory(nbytes // streams * streams)
    parts = [memory[start : start + nbytes // streams] for start in range(0, memory.nbytes, nbytes // streams)]

    def fetch(part: memoryview) -> None:
        with socket.create_connection((address, _PORT)) as source:
            get(source, part)

    started = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(fetch, parts))
    return time.perf_counter() - started


def _memory(nbytes: int) -> memoryview:
    """Returns memory whose pages are written: unwritten pages are all the same page of zeros."""
    memory = memoryview(bytearray(nbytes))
    memory[::4096] = bytes([1]) * len(memory[::4096])
    return memory


def _give(target: socket.socket, part: memoryview) -> None:
    target.sendall(part)


def _get(source: socket.socket, part: memoryview) -> None:
    while part and (count := source.recv_into(part, 0, socket.MSG_WAITALL)):
        part = part[count:]


def _give_sealed(target: socket.socket, part: memoryview) -> None:
    cipher, room = _cipher(), memoryview(bytearray(MAX_BYTES + FRAME_MAC_BYTES))
    for start in range(0, part.nbytes, MAX_BYTES):
        piece = part[start : start + MAX_BYTES]
        frame = room[: piece.nbytes + FRAME_MAC_BYTES]
        cipher.seal(piece, frame, b"")
        target.sendall(frame)


def _get_sealed(source: socket.socket, part: memoryview) -> None:
    cipher, room, digest = _cipher(), memoryview(bytearray(MAX_BYTES + FRAME_MAC_BYTES)), xxhash.xxh3_64()
    for start in range(0, part.nbytes, MAX_BYTES):
        piece = part[start : start + MAX_BYTES]
        frame = room[: piece.nbytes + FRAME_MAC_BYTES]
        _get(source, frame)
        assert cipher.open(frame, piece, b"")
        digest.update(piece)


def _cipher() -> FrameCipher:
    """Returns the fastest available cipher, as keepers choose it."""
    kind = FrameCipherKind.AES if frame_ciphers() & FrameCipherKind.AES else FrameCipherKind.CHACHA
    return FrameCipher(bytes(32), kind)


# --- healing ----------------------------------------------------------------------------------------------------------


def healing(case: Case, folder: Path) -> dict[str, float]:
    """Returns the seconds of a join, by the transport and by raw sockets, and the sender's steps per second."""
    missing()
    with Lab(folder / "lab") as lab:
        hosts = lab.hosts(2)
        job = lab.forked(hosts, replica, case, [host.address for host in hosts])
        assert job.wait(_SECONDS) == [0, 0], job.account()
        found: dict[str, float] = {}
        for rank in range(2):
            found |= json.loads((lab.shared / f"healed-{rank}").read_text())
        return found


def replica(case: Case, addresses: Sequence[str]) -> None:
    """Offers the state of rank 0 to rank 1, while rank 0 continues training. Then raw sockets carry as many bytes,
    plain and with the cipher and a digest.
    """
    rank = _begin()
    state = {key.partition(".")[2]: tensor for key, tensor in _state(case["gib"], float(rank == 0)).items()}
    streams, nbytes = max(cores(), _STREAMS), sum(tensor.nbytes for tensor in state.values())
    transport = TensorizerTransport(lambda: state, interface=addresses[rank])
    metadata, wait = [transport.metadata()], timedelta(seconds=_SECONDS)
    dist.broadcast_object_list(metadata)
    if rank == 0:
        started = time.perf_counter()
        transport.send_checkpoint([1], 1, state, wait)
        staged = time.perf_counter() - started
        listener, memory = socket.create_server((addresses[0], _PORT)), _memory(nbytes // streams)
        dist.barrier()
        beside = _steps_until_met()
        transport.shutdown()
        found = {"staged": staged, "steps, healing": beside}
        for name, give in (("raw sockets", _give), (_SEALED, _give_sealed)):
            if os.fork() == 0:
                _serve_raw(listener, memory, streams, give)  # with the priority of such a keeper
                os._exit(0)
            dist.barrier()
            found[f"steps, {name}"] = _steps_until_met()
    else:
        dist.barrier()
        started = time.perf_counter()
        transport.recv_checkpoint(0, metadata[0], 1, wait)
        seconds = time.perf_counter() - started
        assert all(bool((tensor == 1).all()) for tensor in state.values())
        dist.barrier()
        found = {"healing": seconds}
        for name, get in (("raw sockets", _get), (_SEALED, _get_sealed)):
            dist.barrier()
            found[name] = _raw_seconds(addresses[0], nbytes, streams, get)
            dist.barrier()
        transport.shutdown()
    _tell(f"healed-{rank}", found)
    dist.barrier()
    os._exit(0)


def _steps_until_met() -> float:
    """Trains until the other rank is done; returns the steps per second."""
    is_met = threading.Event()

    def meet() -> None:
        dist.barrier()
        is_met.set()

    threading.Thread(target=meet, daemon=True).start()
    matrix, steps, started = torch.rand(256, 256), 0, time.perf_counter()
    while not is_met.is_set():
        matrix = matrix @ matrix / 256
        steps += 1
    return steps / (time.perf_counter() - started)


def render(content: Content) -> str:
    found: dict[str, list[dict[str, Any]]] = {}
    for result in content["results"]:
        ranks = result["ranks"]
        found.setdefault(result["case"]["what"], []).extend(ranks if isinstance(ranks, list) else [ranks])

    def of(kind: str, name: str) -> Spread | None:
        values = (one[name] for one in found.get(kind, ()) if name in one)
        return spread(x for value in values for x in (value if isinstance(value, list) else [value]))

    one, two, raw = _COSTS
    wanted: list[Goal] = [
        ("speed of training, copies=2 / copies=1", ">= 0.98", quotient(of(two, "speed"), of(one, "speed"))),
        (
            "speed of training, copies=2 / raw sockets at that rate",
            ">= 1",
            quotient(of(two, "speed"), of(raw, "speed")),
        ),
        ("stall of a save, copies=2 / copies=1", "<= 1", quotient(of(two, "stalls"), of(one, "stalls"))),
        ("time until durable, copies=2 / copies=1", "<= 1", quotient(of(two, "durable"), of(one, "durable"))),
        (
            "a restart from a peer / raw sockets, speed",
            ">= 0.8",
            quotient(of("restart", "raw sockets"), of("restart", "from a peer")),
        ),
        (
            "a restart from a peer / raw sockets with the same cipher and a digest, speed",
            ">= 0.9",
            quotient(of("restart", _SEALED), of("restart", "from a peer")),
        ),
        (
            "raw sockets with the same cipher and a digest / raw sockets, speed",
            "",
            quotient(of("restart", "raw sockets"), of("restart", _SEALED)),
        ),
        ("healing / raw sockets, speed", ">= 0.9", quotient(of("healing", "raw sockets"), of("healing", "healing"))),
        (
            "healing / raw sockets with the same cipher and a digest, speed",
            ">= 0.9",
            quotient(of("healing", _SEALED), of("healing", "healing")),
        ),
        (
            "speed of the sender's training, healing / raw sockets",
            ">= 1",
            quotient(of("healing", "steps, healing"), of("healing", "steps, raw sockets")),
        ),
    ]
    if "healing" not in found:  # measured before there was such a case
        wanted = wanted[:-3]
    forms = {
        "speed": ("steps a second", "{:.0f}"),
        "stalls": ("stall, s", "{:.3f}"),
        "durable": ("until durable, s", "{:.3f}"),
        "cpu": ("CPU time of a host for a save and 2 s of training, s", "{:.2f}"),
        "sent": ("bytes sent for each save", "{:,.0f}"),
    }
    rows = [[kind, *(cell(of(kind, name), form.format) for name, (_, form) in forms.items())] for kind in _COSTS]
    return page(
        content,
        "Copies on other hosts",
        _WHAT,
        f"{content['rounds']} rounds of each, in turns; {content['gib']:g} GiB in {_TENSORS} tensors on each rank, a "
        f"save every {_EVERY:g} s, copies at the default rate of {DEFAULT_RATE / 1e6:g} MB/s for each host.",
        "peers",
        goals(wanted, form="{:.2f}".format),
        table(("", *(words for words, _ in forms.values())), rows),
        f"A restart of a rank with {content['gib']:g} GiB on a host that holds nothing, and as many bytes by as many "
        "raw sockets into memory that is there, in seconds. The restore also finds the keepers, agrees with the other "
        "rank, and verifies each byte:",
        table(("", "seconds"), [[kind, cell(of("restart", kind), "{:.3f}".format)] for kind in _RESTARTS]),
        *(_of_healing(content["gib"], of) if "healing" in found else ()),
    )


def _of_healing(gib: float, of: Callable[[str, str], Spread | None]) -> tuple[str, str]:
    rows = [
        [
            kind,
            *(
                cell(of("healing", name), form.format)
                for name, form in ((kind, "{:.3f}"), (f"steps, {kind}", "{:.0f}"))
            ),
        ]
        for kind in _HEALING
    ]
    staged = cell(of("healing", "staged"), "{:.3f}".format)
    return (
        f"A replica of torchft that joins, with {gib:g} GiB, by `dcp_tensorizer.integrations.torchft`, and the "
        f"training of the sending replica. `send_checkpoint` took {staged} s. The time until the replica has the state "
        "begins after that, "
        "and has the sender's digests in it. Raw sockets are served by a process beside the training, too:",
        table(("", "seconds", "steps a second of the sender"), rows),
    )


OPTIONS = {
    "gib": {"type": float, "default": 0.5, "help": "of the state of each rank"},
    "rounds": {"type": int, "default": 3},
}

if __name__ == "__main__":
    run("peers", measure, render, about=__doc__, options=OPTIONS)
