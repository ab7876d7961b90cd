"""Two clients of one NFS 4.2 server, in a kernel that has NFS: user-mode Linux, a process of this machine.

``python -m tests.soak.nfs ROUNDS SEED`` is what runs in that kernel, where the server exports an ext4 and each
client is a network namespace with a mount of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_tensorizer import CheckpointManager, SaveLimits

from ..hosts.disks import command
from .checks import collect_all, left_over
from .tally import Part, Tally, Unavailable

__all__ = ["PART", "run"]

_ROOT = Path(__file__).resolve().parents[2]
_MODULES = Path("/usr/lib/uml/modules")
_TOOLS = {
    "user-mode-linux": "linux.uml",
    "kmod": "modprobe",
    "nfs-kernel-server": "exportfs",
    "nfs-common": "mount.nfs",
}
_MEMORY = "2500M"
_ROUND_SECONDS, _START_SECONDS = 240.0, 600.0  # it has one slow processor
_PARTITION = 15.0
_CLIENTS, _SHARED, _EXPORTED = (2, 3), "/mnt/shared", "/mnt/disk"
_NUMBERS = 100_000
_STEPS = 4  # of the last run
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000

_INIT = f"""#!/bin/sh
export PATH=/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc; mount -t sysfs sys /sys
for path in /run /tmp /mnt /dev/shm /var/lib/nfs; do mkdir -p $path; mount -t tmpfs tmpfs $path; done
mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/rpc_pipefs /run/user/0; touch /var/lib/nfs/etab /var/lib/nfs/rmtab
mkdir -p /tmp/kernel/lib/modules {_EXPORTED} {_SHARED}
ln -s {_MODULES}/$(uname -r) /tmp/kernel/lib/modules/$(uname -r)
modprobe -d /tmp/kernel -a veth bridge nfsd nfsv4
mount /dev/ubda {_EXPORTED}; mount -t nfsd nfsd /proc/fs/nfsd
ip link set lo up
ip link add br0 type bridge; ip addr add 10.8.0.1/24 dev br0; ip link set br0 up
exportfs -i -o rw,no_root_squash,fsid=0,no_subtree_check,insecure '10.8.0.0/24:{_EXPORTED}'
rpc.mountd -N 3 2>/dev/null; rpc.nfsd -N 3 -V 4.2 4
for n in {" ".join(map(str, _CLIENTS))}; do
    ip netns add client$n; ip link add v$n type veth peer name eth0 netns client$n; ip link set v$n master br0 up
    ip -n client$n addr add 10.8.0.$n/24 dev eth0; ip -n client$n link set eth0 up; ip -n client$n link set lo up
    mkdir /mnt/client$n; nsenter --net=/run/netns/client$n mount -t nfs -o vers=4.2,sec=sys 10.8.0.1:/ /mnt/client$n
done
mount -t nfs4 | sed 's/(.*vers=/ version /; s/,.*//'
cd "$WHERE"; "$PYTHON" -m tests.soak.nfs "$ROUNDS" "$SEED"
"$PYTHON" -S -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321FEDC)'
"""


def run(rounds: int, seed: int, folder: Path) -> Tally:
    """Starts the kernel, and returns what its rounds counted.

    Raises:
        Unavailable: it is not here, or not a thing that it needs.
    """
    absent = [package for package, name in _TOOLS.items() if shutil.which(name) is None]
    if os.geteuid() or absent or not _MODULES.exists():
        raise Unavailable(f"it needs root, and these packages: {', '.join(absent or _TOOLS)}")
    disk, init = folder / "disk", folder / "init"
    with open(disk, "wb") as file:
        file.truncate(512 << 20)
    command("mkfs.ext4", "-q", "-F", disk)
    init.write_text(_INIT)
    init.chmod(0o755)
    words = [f"mem={_MEMORY}", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw", "quiet", f"ubd0={disk}"]
    words += [f"init={init}", "con=null", "con0=null,fd:1", f"WHERE={_ROOT}", f"PYTHON={sys.executable}"]
    words += [f"ROUNDS={rounds}", f"SEED={seed}", f"PYTHONPATH={_ROOT}"]
    tally, log = Tally(), folder / "log"
    with open(log, "wb") as output:
        kernel = subprocess.Popen(
            ["linux.uml", *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            kernel.wait(_START_SECONDS + rounds * _ROUND_SECONDS)
        except subprocess.TimeoutExpired:
            tally.blame("hung", f"the kernel: {log.read_text(errors='replace')[-400:]}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(kernel.pid, signal.SIGKILL)
            kernel.wait()
    lines = log.read_text(errors="replace").splitlines()
    if told := [line for line in lines if line.startswith('{"rounds"')]:
        return Tally(**json.loads(told[-1]))
    if tally.is_good:
        raise Unavailable(f"the kernel told nothing: {' | '.join(lines[-8:])}")
    return tally


# --- in that kernel ---------------------------------------------------------------------------------------------------


def _rounds(rounds: int, seed: int, tally: Tally) -> None:
    """Starts a job with a rank on each client, again and again, and lets something happen to it."""
    chance = random.Random(seed)
    for number in range(rounds + 1):
        is_last = number == rounds
        what = "" if is_last else chance.choice(("a rank is killed", "both are killed", "a client is cut off for 15 s"))
        places = chance.sample(_CLIENTS, 2)
        before = _newest("committed")
        for path in Path("/tmp").glob("told-*"):
            path.unlink()
        ranks = [_forked(rank, client, number, _STEPS if is_last else 0) for rank, client in enumerate(places)]
        try:
            _until(lambda: all(Path(f"/tmp/told-restored-{rank}").exists() for rank in range(2)))
            found = {Path(f"/tmp/told-restored-{rank}").read_text() for rank in range(2)}
            if len(found) != 1 or "wrong" in str(found):
                tally.blame("wrong", f"round {number}: {found}")
            elif int(found.pop()) < before:
                tally.blame("lost", f"round {number}: {before} was committed")
            if is_last:
                for rank in ranks:
                    if code := os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]):
                        tally.blame("wrong", f"the last run ended with {code}")
                break
            _until(lambda: _newest("committed") > before)  # noqa: B023
            time.sleep(chance.uniform(0.0, 2.0))
            if "cut" in what:
                command("ip", "link", "set", f"v{places[1]}", "down")
                time.sleep(_PARTITION)
                command("ip", "link", "set", f"v{places[1]}", "up")
                since = _newest("committed")
                _until(lambda: _newest("committed") > since + 1)  # noqa: B023
        except TimeoutError:
            tally.blame("hung", f"round {number}: {what}")
        for rank in ranks if "a rank" not in what else ranks[chance.randrange(2) :]:
            os.kill(rank, signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 0.5))
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
        tally.rounds += 1
        tally.count(what)
        if not tally.is_good:
            return
    collect_all(Path(_EXPORTED, "run"))
    for name in left_over(Path(_EXPORTED, "run")):
        tally.blame("left", name)


def _newest(event: str) -> int:
    path = Path(f"/tmp/newest-{event}")
    return int(path.read_text() or 0) if path.exists() else 0


def _until(condition: object) -> None:
    deadline = time.monotonic() + _ROUND_SECONDS
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def _forked(rank: int, client: int, number: int, last: int) -> int:
    """A rank in a fork of this process, on a client: with its network, and its mount where all clients have theirs."""
    if child := os.fork():
        return child
    code = 1
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/client{client}") as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET) or libc.unshare(_CLONE_NEWNS):
                raise OSError(ctypes.get_errno(), "setns")
        command("mount", "--make-rprivate", "/")
        command("mount", "--bind", f"/mnt/client{client}", _SHARED)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth0"}
        os.environ["MASTER_PORT"] = str(29500 + number)
        _rank(rank, number, last)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _rank(rank: int, number: int, last: int) -> None:
    """resumes from what it finds, and saves each step."""
    store = Path(f"/tmp/address-{number}")
    if rank == 0:
        (address,) = [w for w in command("ip", "-4", "-o", "addr", "show", "dev", "eth0").split() if w.endswith("/24")]
        Path("/tmp/address").write_text(address.removesuffix("/24"))
        os.rename("/tmp/address", store)
    _until(store.exists)
    os.environ["MASTER_ADDR"] = store.read_text()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    full = torch.arange(_NUMBERS, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None), "step": 0}
    with CheckpointManager(f"{_SHARED}/run", save_every=1, keep_latest=2, limits=SaveLimits(timeout=100.0)) as manager:
        step = manager.restore(state) or 0
        right = torch.equal(state["w"].to_local(), _part(full, rank) + step) and state["step"] == step
        Path("/tmp/told").with_suffix(f".{rank}").write_text(str(step) if right else f"wrong at {step}")
        os.rename(f"/tmp/told.{rank}", f"/tmp/told-restored-{rank}")
        first = step
        while not last or step < first + last:
            step += 1
            state["w"] += 1
            state["step"] = step
            manager.save(step, state, wait=True)
            if rank == 0:
                Path("/tmp/newest").write_text(str(step))
                os.rename("/tmp/newest", "/tmp/newest-committed")
    dist.destroy_process_group()


def _part(full: torch.Tensor, rank: int) -> torch.Tensor:
    return full.chunk(2)[rank]


PART = Part(
    "NFS 4.2 with two clients",
    "kills and partitions",
    "A job has a rank on each of two clients of one NFS 4.2 server (Linux's, over ext4). This kernel has no NFS: all "
    "of it runs in user-mode Linux, as a process. The ranks save each step. One is killed at a random moment, or both, "
    f"or a client is cut off for {_PARTITION:g} s, after which the saves continue. The job restarts, on swapped "
    "clients now and then, and has to find the newest step that was committed, or a newer one.",
    12,
    run,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    of_all = Tally()
    try:
        _rounds(int(sys.argv[1]), int(sys.argv[2]), of_all)
    finally:
        print(json.dumps(of_all.as_dict()), flush=True)
