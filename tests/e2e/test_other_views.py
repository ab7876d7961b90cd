"""One directory seen through two mounts: a lock that is taken through one cannot be seen through the other."""

import json

import pytest

from ..lab.processes import can_mount, run_python_with

OVERLAY = "mkdir l u w m && mount -t overlay -o lowerdir=l,upperdir=u,workdir=w o m"

# Overwrites a checkpoint through an overlay. Before the commit, collects through the overlay's upper directory.
JOB = """
import json, sys
from pathlib import Path
from unittest import mock
import torch
import torch.distributed.checkpoint as dcp
from dcp_tensorizer import TensorizerStorageReader, TensorizerStorageWriter
from dcp_tensorizer._saving import save
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer.tools import collect

merged, upper = (Path(sys.argv[1], name, "run") for name in ("m", "u"))
commit, told = save.commit, {}

def collect_and_commit(*args, **options):
    for name, path in (("merged", merged), ("upper", upper)):
        told[name] = sorted({str(removed.kept) for removed in collect(path, keep_latest=1)})
    return commit(*args, **options)

with TensorizerStorageWriter(merged / "step-1") as writer:
    dcp.save({"x": torch.ones(4)}, storage_writer=writer)
    with mock.patch.object(save, "commit", collect_and_commit):
        dcp.save({"x": torch.full((4,), 2.0)}, storage_writer=writer)
state = {"x": torch.zeros(4)}
dcp.load(state, storage_reader=TensorizerStorageReader(merged / "step-1"))
print(json.dumps([told, state["x"].tolist(), len(list((merged / "step-1").iterdir()))]))
"""


@pytest.mark.skipif(
    not can_mount(f"mount -t tmpfs none /mnt && cd /mnt && {OVERLAY}"),
    reason="this system lets nobody mount an overlay",
)
def test_a_collection_through_another_view(tmp_path):
    """It finds a save's files and no lock, removes nothing and says why; the save commits, and its checkpoint loads."""
    done = run_python_with(f'mount -t tmpfs none "$1" && (cd "$1" && {OVERLAY})', JOB, tmp_path)
    told, values, files = json.loads(done.stdout)
    assert told == {
        "merged": ["the directory is in use, for example by a save in progress"],
        "upper": [
            "a save or a copy may be in progress there. To remove its files once they are old enough, pass "
            "--older-than with an age that no save or copy exceeds."
        ],
    }
    assert (values, files) == ([2.0] * 4, 2)
