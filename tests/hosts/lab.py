"""Several hosts on one machine: each has its own network, mounts, processes, name, boot id and disk.

A host hangs on one process, the first of its process namespace: with that, all of the host ends at once. It ends when
the tests do, even if they are killed; and the network ends with the hosts. A host may also have a user, a umask and a
clock of its own, lose packets, and get little of the processors.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar

import psutil

from ..lab.processes import ROOT
from ..lab.servers import KEY, SECRET, s3_server
from .disks import command

__all__ = ["DISK", "SHARED", "Host", "Job", "Lab", "Program"]

_T = TypeVar("_T")

DISK = Path("/mnt/disk")
"""On each host: a directory that no other host sees. It outlives the host's death, unless that takes the disk."""
SHARED = Path("/mnt/shared")
"""On each host: a directory that all of them see."""

_SECONDS = 60.0
_WITH_US = ("setpriv", "--pdeathsig", "KILL")

# $1: the host's folder outside, $2: the folder that all share, $3: its name, $4: its user, $5...: what it sees of the
# machine's /tmp, /run and /root, which are its own. The shell waits for all that lose their parent, as an init does.
_BOOT = """
set -e
folder=$1 shared=$2 name=$3 user=$4; shift 4
hostname "$name"
mount -n --bind "$folder/hosts" /etc/hosts
mount -n --bind "$folder/boot_id" /proc/sys/kernel/random/boot_id
mount -n -t tmpfs tmpfs /mnt
mkdir /mnt/disk /mnt/shared /mnt/tmp /mnt/run /mnt/root
mount -n --bind "$folder/disk" /mnt/disk
mount -n --rbind "$shared" /mnt/shared
mount -n -t tmpfs -o mode=1777 tmpfs /mnt/tmp
mount -n -t tmpfs -o mode=755 tmpfs /mnt/run
mount -n -t tmpfs -o mode=755 tmpfs /mnt/root
for path; do mkdir -p "/mnt$path"; mount -n --rbind "$path" "/mnt$path"; done
for path in /tmp /run /root; do mount -n --move "/mnt$path" "$path"; done
mount -n -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p /run/user
mkdir -m 700 "/run/user/$user"
chown "$user" "/run/user/$user" /mnt/disk
echo up
exec >/dev/null
sleep infinity & while :; do wait; done
"""

# What programs ask for the time of day, when this is loaded before the C library. Files have the times of the machine,
# as those of a server have, whose clock is yet another one.
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long ahead(void) { const char *words = getenv("CLOCK_AHEAD"); return words ? atol(words) : 0; }
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, now);
    if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    int code = clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec, now->tv_usec = precise.tv_nsec / 1000;
    return code;
}
time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
"""

_PR_SET_DUMPABLE = 4
_PERIOD = 20_000  # microseconds in which a slow host gets its share
_GROUP = 1000  # of all users of hosts but root


class Lab:
    """A network of hosts.

    Args:
        folder: For the hosts' disks and what they share; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.shared = folder, folder / "shared"
        self.shared.mkdir(parents=True)
        os.chown(self.shared, -1, _GROUP)
        self.shared.chmod(0o2777)  # so what lies in it is of that group
        self._hosts: list[Host] = []
        self._jobs: list[Job] = []
        self._port = 29500
        self._switch = subprocess.Popen(
            [*_WITH_US, "unshare", "--net", "sh", "-c", "echo up; exec sleep infinity >&-"], stdout=subprocess.PIPE
        )
        assert self._switch.stdout is not None and self._switch.stdout.readline() == b"up\n"
        self._switch.stdout.close()
        self.ip("link", "add", "br0", "type", "bridge")
        self.ip("link", "set", "br0", "up")

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._jobs:
            job.end()
        for host in self._hosts:
            host.remove()
        self._switch.kill()
        self._switch.wait()

    def ip(self, *words: object) -> str:
        """Runs ``ip`` where the hosts' links meet: the one of host 3 is ``v3``."""
        return command("nsenter", f"--target={self.switch}", "--net", "ip", *words)

    @property
    def switch(self) -> int:
        """The process in whose network the hosts' links meet."""
        return self._switch.pid

    def host(self, *, user: int = 0, umask: int = 0o022, ahead: int = 0) -> Host:
        """Adds a host, which is up.

        Args:
            user: Of its programs; all but root are of one group.
            umask: Of its programs.
            ahead: Seconds that its clock is ahead of the machine's. Its programs are not forked then; needs ``cc``.
        """
        self._hosts.append(Host(self, len(self._hosts) + 1, user, umask, ahead))
        return self._hosts[-1]

    def hosts(self, count: int) -> list[Host]:
        """Adds several."""
        return [self.host() for _ in range(count)]

    def s3(self) -> tuple[Host, str, dict[str, str]]:
        """Adds a host with SeaweedFS; returns it, the URL of a bucket there, and the variables of who uses it."""
        host = self.host()
        self._remember([host.fork(_serve, host.address)])
        ready = host.disk / "bucket"
        endpoint, bucket = self._jobs[-1].until(lambda: ready.exists() and ready.read_text().split())
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
        return host, f"s3://{bucket}", keys | {"AWS_ENDPOINT_URL": endpoint}

    def torchrun(
        self,
        hosts: Sequence[Host],
        *program: object,
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
        max_restarts: int = 0,
    ) -> Job:
        """Starts a program with an agent of torchrun on each host.

        Args:
            hosts: They are the nodes, in this order.
            program: A script and its arguments; or ``-m``, a module, its arguments.
            processes: Ranks of each host.
            environment: More variables.
            max_restarts: As torchrun's.
        """
        self._port += 10  # the one before may be taken by what has ended
        words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"]
        words += [
            f"--nproc-per-node={processes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={hosts[0].address}:{self._port}",
        ]
        words += [f"--rdzv-id={uuid.uuid4().hex}", f"--max-restarts={max_restarts}"]
        agents = [
            host.start(*words, f"--node-rank={rank}", f"--local-addr={host.address}", *program, environment=environment)
            for rank, host in enumerate(hosts)
        ]
        return self._remember(agents)

    def ranks(self, hosts: Sequence[Host], *program: object, environment: Mapping[str, str] | None = None) -> Job:
        """Starts a program as one rank on each host, without torchrun: in half the time, and nothing ends the others.

        Args:
            hosts: The host of each rank. One that is there twice has two ranks.
            program: Arguments of Python.
            environment: More variables.
        """
        own = self._places(hosts)
        more = dict(environment or {})
        return self._remember(
            [h.start(sys.executable, *program, environment=o | more) for h, o in zip(hosts, own, strict=True)]
        )

    def forked(
        self,
        hosts: Sequence[Host],
        work: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """Starts a function of a module as one rank on each host, like `ranks`, but nothing has to be imported.

        Args:
            hosts: The host of each rank.
            work: It, and all that it imports, is imported once by a process whose forks the ranks are.
            arguments: Of the function; what pickle can hold.
            environment: More variables.
        """
        own, more = self._places(hosts), dict(environment or {})
        return self._remember([h.fork(work, *arguments, environment=o | more) for h, o in zip(hosts, own, strict=True)])

    def _places(self, hosts: Sequence[Host]) -> list[dict[str, str]]:
        """The variables by which ranks find each other."""
        self._port += 10
        found = []
        for rank, host in enumerate(hosts):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": len(hosts),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": self._port,
            }
            variables |= {"LOCAL_RANK": hosts[:rank].count(host), "LOCAL_WORLD_SIZE": hosts.count(host)}
            found.append({name: str(value) for name, value in variables.items()})
        return found

    def _remember(self, programs: list[Program]) -> Job:
        self._jobs.append(Job(programs))
        return self._jobs[-1]


class Host:
    """One host, at `address`, with its files of `DISK` in `disk`. `Lab.host` makes it."""

    def __init__(self, lab: Lab, number: int, user: int, umask: int, ahead: int) -> None:
        self._lab, self.number = lab, number
        self.user, self._umask, self.ahead = user, umask, ahead
        self._group: Path | None = None  # the control group of its programs, if it is slow
        self.name, self.address = f"host{number}", _address(number)
        self.folder = lab.folder / self.name
        self.disk = self.folder / "disk"
        self.disk.mkdir(parents=True)
        self._started = 0
        self.boot()

    def boot(self) -> None:
        """Starts it, with a new boot id, and what is on its disk."""
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        names = [f"{_address(number)} host{number}\n" for number in range(1, max(100, self.number + 1))]
        (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", f"{self.address} {self.name}\n", *names]))
        own = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
        seen = {Path(path).resolve() for path in (ROOT, sys.prefix, sys.base_prefix)} | {ROOT, Path(sys.prefix)}
        binds = [path for path in sorted(seen) if any(map(path.is_relative_to, ("/tmp", "/run", "/root")))]
        self._outer = subprocess.Popen(
            [
                *(*_WITH_US, "unshare", *own, "sh", "-c", _BOOT, "sh"),
                *(self.folder, self._lab.shared, self.name, str(self.user), *binds),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._outer.stdout is not None and self._outer.stderr is not None
        if self._outer.stdout.readline() != b"up\n":
            _, words = self._outer.communicate()
            raise OSError(f"{self.name} did not start: {words.decode()}")
        self._outer.stdout.close()
        self._outer.stderr.close()
        (init,) = psutil.Process(self._outer.pid).children()
        self.init = init.pid
        with suppress(OSError):  # the kernel removes that of a host that has died, but in its own time
            self._lab.ip("link", "delete", f"v{self.number}")
        self._lab.ip("link", "add", f"v{self.number}", "type", "veth", "peer", "name", "eth0", "netns", self.init)
        self._lab.ip("link", "set", f"v{self.number}", "master", "br0", "up")
        for words in (
            ["addr", "add", f"{self.address}/16", "dev", "eth0"],
            *(["link", "set", n, "up"] for n in ("lo", "eth0")),
        ):
            command("nsenter", f"--target={self.init}", "--net", "ip", *words)

    def start(self, *words: object, environment: Mapping[str, str] | None = None) -> Program:
        """Starts a command on it, in `DISK`."""
        variables, log = self._surroundings(environment)
        inside = ["nsenter", f"--target={self.init}", "--net", "--mount", "--uts", "--ipc", "--pid"]
        if self._group is not None:
            inside = ["sh", "-c", 'echo 0 > "$0"; exec "$@"', str(self._group / "cgroup.procs"), *inside]
        if self.user:
            inside += ["setpriv", f"--reuid={self.user}", f"--regid={_GROUP}", "--clear-groups"]
        if self.ahead:
            inside += ["env", f"LD_PRELOAD={self._clock()}", f"CLOCK_AHEAD={self.ahead}"]
        with open(log, "wb") as output:
            outer = subprocess.Popen(
                [*inside, "env", f"--chdir={DISK}", *map(str, words)],
                env=variables,
                umask=self._umask,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Program(f"{self.name}: {' '.join(map(str, words[:6]))}", outer, log)

    def fork(
        self, work: Callable[..., object], *arguments: object, environment: Mapping[str, str] | None = None
    ) -> Program:
        """Starts a function of a module on it, in `DISK`, in a fork of a process that has imported it."""
        assert not self.ahead, "a fork has loaded the C library before"
        variables, log = self._surroundings(environment)
        place = _Place(self.init, self.user, self._umask, self._group)
        process = _nursery(work.__module__).Process(target=_enter, args=(place, variables, log, work, arguments))
        process.start()
        return Program(f"{self.name}: {work.__module__}", Forked(process), log)

    def _surroundings(self, environment: Mapping[str, str] | None) -> tuple[dict[str, str], Path]:
        """The variables of a program, and the file of what it prints."""
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": "/root",
            "XDG_RUNTIME_DIR": f"/run/user/{self.user}",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "HOST": self.name,
        } | dict(environment or {})
        self._started += 1
        return variables, self.folder / f"{self._started}.log"

    def run(self, *words: object, environment: Mapping[str, str] | None = None) -> str:
        """Runs a command on it to its end, and returns what it prints; an error has that."""
        program = self.start(*words, environment=environment)
        try:
            assert program.wait() == 0, program.account()
        finally:
            program.end()
        return program.words()

    def left_over(self) -> list[str]:
        """Its processes, but for those that keep it up, and its files in memory and on its disk."""
        mine = os.readlink(f"/proc/{self.init}/ns/pid")
        found = []
        for process in psutil.process_iter(["cmdline", "ppid"]):
            with suppress(OSError):
                line = process.info["cmdline"] or [""]
                if os.readlink(f"/proc/{process.pid}/ns/pid") == mine and process.pid != self.init:
                    found += [" ".join(line)] if line[0] != "sleep" else []
        root = Path(f"/proc/{self.init}/root")
        for folder in (f"run/user/{self.user}", "dev/shm", str(DISK)[1:]):
            found += [str(path) for path in (root / folder).rglob("*") if not path.is_dir()]
        mounts = [Path(line.split()[4]) for line in Path(f"/proc/{self.init}/mountinfo").read_text().splitlines()]
        for path in (root / "tmp").iterdir():
            leads_to_mount = any(mount.is_relative_to(Path("/tmp") / path.name) for mount in mounts)  # or is one
            if not leads_to_mount and not path.name.startswith("torchinductor_"):
                found.append(str(path))
        return found

    def cut(self) -> None:
        """Takes it from the network: what is sent to it or by it is lost, and nobody is told."""
        self._lab.ip("link", "set", f"v{self.number}", "down")

    def heal(self) -> None:
        """Gives it its network again."""
        self._lab.ip("link", "set", f"v{self.number}", "up")

    def lose(self, percent: int) -> None:
        """Drops so many packets of a hundred that it sends, and that it gets; needs ``nft``."""
        drop = f"numgen random mod 100 < {percent} counter drop"
        places = [
            (self.init, "inet", "hook input"),
            (self._lab.switch, "netdev", f"hook ingress device v{self.number}"),
        ]
        for pid, family, hook in places:
            table = f"{family} losses{self.number}"
            words = f"add table {table}; add chain {table} drops {{ type filter {hook} priority 0; }}; "
            words += f"flush chain {table} drops; add rule {table} drops {drop}" if percent else f"delete table {table}"
            command("nsenter", f"--target={pid}", "--net", "nft", words)

    def lost(self) -> int:
        """Returns how many packets `lose` has dropped."""
        places = [(self.init, "inet"), (self._lab.switch, "netdev")]
        tables = [
            command("nsenter", f"--target={pid}", "--net", "nft", f"list table {family} losses{self.number}")
            for pid, family in places
        ]
        return sum(int(count) for table in tables for count in re.findall(r"counter packets (\d+)", table))

    def slow(self, share: float) -> None:
        """Gives the programs that are started on it from now on so much of one processor, all together.

        Raises `OSError` where this user cannot make a control group.
        """
        root = Path("/sys/fs/cgroup")
        is_new = (root / "cgroup.controllers").exists()
        group = self._group = (root if is_new else root / "cpu") / f"lab-{os.getpid()}-{self.name}"
        group.mkdir(exist_ok=True)
        quota = round(share * _PERIOD)
        if is_new:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))

    def die(self, *, with_disk: bool = False) -> None:
        """Ends it as a loss of power does: all of its processes at once, its memory, and its disk if that is said."""
        if self._outer.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.init, signal.SIGKILL)
            self._outer.wait(_SECONDS)
        if with_disk:
            shutil.rmtree(self.disk)
            self.disk.mkdir()

    def remove(self) -> None:
        """Ends it for good; none of its programs runs any more."""
        self.die()
        if self._group is not None:
            deadline = time.monotonic() + _SECONDS
            while (self._group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.01)  # the kernel ends them in its own time
            self._group.rmdir()

    def _clock(self) -> Path:
        """The library that shifts the clock, which is made once."""
        library = self._lab.shared / "clock.so"
        if not library.exists():
            words = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-o", str(library), "-", "-ldl"]
            subprocess.run(words, input=_CLOCK, text=True, check=True)
        return SHARED / library.name


class Forked:
    """A process on a host that was forked there, with the methods of `subprocess.Popen`."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return code

    def kill(self) -> None:
        self._process.kill()


@functools.cache
def _nursery(module: str) -> ForkServerContext:
    """A process that has imported a module, and forks. It ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", module])  # torch imports it when the first tensor is distributed
    return context


class _Place(NamedTuple):
    """Where a fork goes: the namespaces of a host, its user, its umask and its control group."""

    init: int
    user: int
    umask: int
    group: Path | None


def _enter(
    place: _Place, variables: dict[str, str], log: Path, work: Callable[..., object], arguments: Sequence[object]
) -> None:
    """Enters the namespaces of a host, as nsenter does, and waits for a child there, which does the work."""
    with open(log, "wb") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    if place.group is not None:
        (place.group / "cgroup.procs").write_text("0")
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = ("net", "uts", "ipc", "pid", "mnt")
    namespaces = [os.open(f"/proc/{place.init}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    for descriptor in namespaces:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    os.chdir(DISK)
    os.setsid()
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(max(os.waitstatus_to_exitcode(status), 0) or (1 if status else 0))
    code = 1
    try:
        os.umask(place.umask)
        if place.user:
            os.setgroups([])
            os.setgid(_GROUP)
            os.setuid(place.user)
            libc.prctl(_PR_SET_DUMPABLE, 1)  # else its files below /proc are root's
        os.environ.clear()
        os.environ.update(variables)
        work(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _serve(address: str) -> None:
    """Serves S3 until the host ends, and writes where."""
    with s3_server(DISK, address) as server:
        (DISK / "new").write_text(f"{server.endpoint} {server.bucket}")
        os.rename(DISK / "new", DISK / "bucket")
        signal.pause()


def _address(number: int) -> str:
    return f"10.9.{number // 250}.{number % 250 + 1}"


@dataclass
class Program:
    """A process on a host."""

    name: str
    outer: subprocess.Popen[bytes] | Forked
    """It waits for the process, and ends as that does."""
    log: Path

    @property
    def process(self) -> psutil.Process:
        """The process itself."""
        deadline = time.monotonic() + _SECONDS
        while not (children := psutil.Process(self.outer.pid).children()):
            assert time.monotonic() < deadline, self.account()
            time.sleep(0.001)
        return children[0]

    def wait(self, timeout: float = _SECONDS) -> int:
        """Waits for its end; returns the code that it ends with, negative for a signal."""
        try:
            return self.outer.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s: {self.account()}") from None

    def words(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def account(self) -> str:
        """Its name, its end and what it has printed last."""
        return f"{self.name} (ended with {self.outer.poll()}):\n{self.words()[-4000:]}"

    def kill(self) -> None:
        """Kills it, if it still runs. What it has started ends with the host."""
        if self.outer.poll() is None:
            with suppress(psutil.Error):  # where its host has died, it has ended, and the outer one ends now
                for process in psutil.Process(self.outer.pid).children():
                    process.kill()
            self.outer.kill()

    def end(self) -> None:
        """Kills it, and waits for its end."""
        self.kill()
        self.outer.wait(_SECONDS)


@dataclass
class Job:
    """What was started on several hosts."""

    programs: list[Program]

    def wait(self, timeout: float = _SECONDS) -> list[int]:
        """Waits for all; returns what each ended with. One that does not end fails, with what all have printed."""
        deadline = time.monotonic() + timeout
        try:
            return [program.wait(max(0.0, deadline - time.monotonic())) for program in self.programs]
        except AssertionError:
            raise AssertionError(f"after {timeout} s: {self.account()}") from None

    def account(self) -> str:
        """What all have printed."""
        return "\n".join(program.account() for program in self.programs)

    def until(self, condition: Callable[[], _T], timeout: float = _SECONDS) -> _T:
        """Looks until a condition is true, and returns it.

        Fails at the timeout, or when all have ended without it, with what all have printed.
        """
        deadline = time.monotonic() + timeout
        while True:
            is_over = all(program.outer.poll() is not None for program in self.programs)
            if value := condition():
                return value
            assert not is_over, f"it did not come about: {self.account()}"
            assert time.monotonic() < deadline, f"it did not come about in {timeout} s: {self.account()}"
            time.sleep(0.01)

    def end(self) -> None:
        """Kills what still runs, all before it waits: no rank goes on while others end."""
        for program in self.programs:
            program.kill()
        for program in self.programs:
            program.end()
