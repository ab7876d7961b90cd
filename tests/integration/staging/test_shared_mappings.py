"""Shared memory, as another process maps it."""

from __future__ import annotations

import torch

from dcp_tensorizer._staging.shared_mappings import SharedMappings

from ...lab.processes import run_python
from ...lab.states import raw


def test_another_process_sees_it() -> None:
    """Another process maps the memory by the result of `locate`."""
    tensor = torch.arange(1000, dtype=torch.int32).share_memory_()
    place = SharedMappings().locate(tensor)
    assert place is not None
    (path, device, inode), offset = place
    script = """
import sys
from dcp_tensorizer._staging.shared_mappings import MappedFile, map_shared
path, device, inode, offset = sys.argv[1:]
mapping = map_shared(MappedFile(path, int(device), int(inode)))
print(sum(mapping[int(offset) : int(offset) + 4000]))
"""
    done = run_python(script, path, str(device), str(inode), str(offset))
    assert int(done.stdout) == sum(raw(tensor))


def test_memory_that_torch_shares_by_file_names_is_found() -> None:
    """This is torch's other way of sharing. It runs in another process, whose manager process outlives the test."""
    script = """
import torch
from dcp_tensorizer._staging.shared_mappings import SharedMappings, map_shared
torch.multiprocessing.set_sharing_strategy("file_system")
tensor = torch.arange(1000, dtype=torch.uint8).share_memory_()
file, offset = SharedMappings().locate(tensor[10:20])
print(list(map_shared(file)[offset : offset + 10]), file.path.startswith("/dev/shm/torch_"))
"""
    assert run_python(script).stdout.strip() == "[10, 11, 12, 13, 14, 15, 16, 17, 18, 19] True"
