"""The lab itself: what hosts have of their own, how they end, and that nothing of them is left."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from ..lab.processes import ROOT
from ..lab.ranks import eventually
from .disks import command
from .lab import DISK, SHARED

# Says what is on the host, and leaves something there.
LOOK = f"""
import os, pathlib, socket
print(socket.gethostname(), pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.getpid() < 100)
for folder in ("/tmp", "/run", "/dev/shm", "{DISK}"):
    assert not list(pathlib.Path(folder).glob("mark-*")), folder
    pathlib.Path(folder, "mark-" + socket.gethostname()).touch()
pathlib.Path("{SHARED}", socket.gethostname()).touch()
"""

JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
sum = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(sum)
print("sum", sum.item())
dist.destroy_process_group()
"""


def test_hosts_have_their_own(lab):
    """Names, boot ids, process ids, /tmp, /run, /dev/shm and disk are a host's own; the shared folder is not."""
    accounts = [host.run(sys.executable, "-c", LOOK).split() for host in lab.hosts(2)]
    assert [account[0] for account in accounts] == ["host1", "host2"]
    boot_ids = {account[1] for account in accounts} | {Path("/proc/sys/kernel/random/boot_id").read_text().strip()}
    assert len(boot_ids) == 3
    assert [account[2] for account in accounts] == ["True", "True"]
    assert sorted(path.name for path in lab.shared.iterdir()) == ["host1", "host2"]
    assert not list(Path("/tmp").glob("mark-*")) and not list(Path("/dev/shm").glob("mark-*"))


def test_torchrun_over_hosts(lab):
    """Real agents on two hosts find each other and work together."""
    program = lab.shared / "job.py"
    program.write_text(JOB)
    job = lab.torchrun(lab.hosts(2), SHARED / "job.py")
    assert job.wait() == [0, 0], job.account()
    assert [program.words().count("sum 3") for program in job.programs] == [1, 1]


def test_a_link_is_cut_and_healed(lab):
    """A host that is cut off hears nothing, and goes on when its link is there again."""
    here, there = lab.hosts(2)
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 5000), 1).close()"
    listen = "import socket, time; s = socket.create_server(('', 5000)); print('listening'); time.sleep(1000)"
    server = there.start(sys.executable, "-c", listen)
    while not server.words():
        assert server.outer.poll() is None, server.account()
    here.run(sys.executable, "-c", connect, there.address)
    there.cut()
    with pytest.raises(AssertionError, match=r"timed out|No route"):
        here.run(sys.executable, "-c", connect, there.address)
    there.heal()
    here.run(sys.executable, "-c", connect, there.address)
    server.end()


def test_a_host_dies_whole(lab):
    """All processes of a host end at once, those in the background too; its disk stays, and its boot id does not."""
    host = lab.host()
    (host.disk / "kept").touch()
    host.run("sh", "-c", "setsid sleep 1000 & cat /proc/sys/kernel/random/boot_id > before")
    everything = psutil.Process(host.init).children
    (sleeper,) = eventually(lambda: [p for p in everything(recursive=True) if p.cmdline() == ["sleep", "1000"]])
    host.die()
    assert not sleeper.is_running()
    host.boot()
    assert host.run("sh", "-c", "ls; cat before; cat /proc/sys/kernel/random/boot_id").split()[:2] == ["before", "kept"]
    assert host.run("cat", "before") != host.run("cat", "/proc/sys/kernel/random/boot_id")
    host.die(with_disk=True)
    assert list(host.disk.iterdir()) == []


def test_nothing_is_left_when_the_tests_are_killed(tmp_path):
    """The processes of hosts end with the tests, and namespaces, links and mounts with them."""
    script = f"""
    import os, pathlib, signal
    from tests.hosts.requirements import missing
    assert missing() is None
    from tests.hosts.disks import Disk
    from tests.hosts.lab import Lab
    folder = pathlib.Path({str(tmp_path)!r})
    disk = Disk(folder / "disk", 1 << 24, "ext4")
    disk.freeze()
    lab = Lab(folder / "lab")
    lab.hosts(2)[0].start("sleep", "1000").process
    print(*(child.pid for child in __import__("psutil").Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    links, mounts = command("ip", "link"), Path("/proc/mounts").read_text()
    script = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(script, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) > 5, done.stderr.decode()
    children = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(children, timeout=30)
    assert [process.cmdline() for process in alive] == []
    assert (command("ip", "link"), Path("/proc/mounts").read_text()) == (links, mounts)
    assert str(tmp_path) not in command("losetup", "--list")
