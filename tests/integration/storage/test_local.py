"""What other processes see of a local directory's lock, and how long it lasts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dcp_tensorizer._storage.local import LocalStorage

_LOCK = """
import sys
from pathlib import Path
from dcp_tensorizer._storage.local import LocalStorage
lock = LocalStorage(Path(sys.argv[1])).lock_directory()
lock.share(1.0)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """The lock ends with its process, even if the process is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", _LOCK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        lock = LocalStorage(tmp_path).lock_directory()
        assert not lock.is_exclusive
        lock.release()
        other.kill()
    lock = LocalStorage(tmp_path).lock_directory()
    assert lock.is_exclusive
    lock.release()


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """The lock ends with the save, even if a child process has a copy of its descriptor."""
    lock = LocalStorage(tmp_path).lock_directory()
    lock.share(1.0)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    lock.release()
    again = LocalStorage(tmp_path).lock_directory()
    assert again.is_exclusive
    again.release()
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)
