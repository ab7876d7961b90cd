"""The staging buffer in a forked child."""

from __future__ import annotations

from ...lab.processes import run_python

FORK = """
import ctypes, gc, mmap, os, signal, sys
import torch
from dcp_tensorizer._runtime.forks import Home, in_child
from dcp_tensorizer._staging.shared_memory import SharedBuffer

buffer = SharedBuffer(1 << 20)
tensor = buffer.allocate(torch.uint8, (1000,)).fill_(42)
address = tensor.data_ptr()

def mapped():
    for line in open("/proc/self/maps"):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "memfd:dcp_tensorizer" in line
    return False

def takes_its_place(owner=None):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    page = address & ~4095
    MAP_FIXED_NOREPLACE = 0x100000
    got = libc.mmap(page, 4096, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0)
    assert got == page, (got, page)
    ctypes.memset(page, 7, 4096)
    return page

assert mapped()
child = os.fork()
if child == 0:
    # The pages are not there; whatever the child puts at their address is its own, and stays when the buffer goes.
    assert not mapped()
    # Nor does it keep the memory when the trainer has given it back.
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    assert not [link for link in links if os.path.lexists(link) and "dcp_tensorizer" in os.readlink(link)]
    page = takes_its_place()
    del tensor
    buffer.close()
    del buffer
    gc.collect()
    assert ctypes.string_at(page, 4096) == bytes([7]) * 4096
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert tensor.tolist() == [42] * 1000
tensor.fill_(43)
assert os.pread(buffer.fd, 4, 0) == bytes([43]) * 4
del tensor
buffer.close()
assert not mapped()

# What lets go before the buffer does may take memory, which may be at its address.
before = Home()
in_child(before, takes_its_place)
buffer = SharedBuffer(1 << 20)
address = buffer._base
child = os.fork()
if child == 0:
    assert ctypes.string_at(address & ~4095, 4096) == bytes([7]) * 4096
    sys.exit(0)  # runs the interpreter's finalizers, the buffer's among them
assert os.waitpid(child, 0)[1] == 0
assert buffer.allocate(torch.uint8, (3,)).fill_(1).tolist() == [1, 1, 1]
os.fstat(buffer.fd)
print("fine")
"""


def test_a_forked_child_neither_has_the_pages_nor_tears_the_buffer_down() -> None:
    """DataLoader workers take no memory for the buffer, and their exit does not change it for the trainer."""
    assert run_python(FORK, fresh=True).stdout == "fine\n"
