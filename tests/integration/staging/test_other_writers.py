"""States that this package stages and a storage writer of another package saves."""

import threading
from concurrent.futures import Future

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _FileSystemWriter  # a StorageWriter that is no AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcp_tensorizer import StagingError, TensorizerStorageWriter, installed
from dcp_tensorizer._staging.staged_save import StagedSave

from ...lab.waiting import WAIT, Gate, HeldTensor, save_thread, wait_until_inside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=["install", "async_stager"])
def begin_save(request, tmp_path):
    """Saves with another package's writer. Returns the future of the checkpoint."""

    def begin(state, **options):
        if request.param == "install":
            with installed(writer_options=options):
                return dcp.async_save(state, storage_writer=_FileSystemWriter(tmp_path))
        with TensorizerStorageWriter(**options) as stager:
            return dcp.async_save(state, storage_writer=_FileSystemWriter(tmp_path), async_stager=stager)

    def begin_one(state, **options):
        begun = begin(state, **options)
        assert isinstance(begun, AsyncSaveResponse if options else Future)
        return begun.upload_completion if options else begun

    return begin_one


def fail():
    raise RuntimeError("unspecified launch failure")


@pytest.mark.parametrize("overlap", [False, True], ids=["copied at once", "overlapped"])
@pytest.mark.parametrize(
    ("make", "words"),
    [(threading.Lock, "'bad'"), (lambda: HeldTensor(torch.ones(10), fail), "unspecified launch failure")],
    ids=["object", "copy"],
)
def test_the_save_raises_the_error_of_staging(tmp_path, begin_save, make, words, overlap):
    """DCP gives the error to all ranks, and no checkpoint is committed."""
    options = {"overlap_staging": True} if overlap else {}
    with pytest.raises(CheckpointException) as caught:
        begin_save({"w": torch.ones(3), "bad": make()}, **options).result(WAIT)
    error = caught.value.failures[0][0]
    assert isinstance(error, StagingError)
    assert words in str(error)
    assert not (tmp_path / ".metadata").exists()


def test_an_overlapped_save_waits_for_the_copies(tmp_path, begin_save):
    """The other writer gets complete values, though it reads them at once."""
    copying, before = Gate(), set(threading.enumerate())
    opening = threading.Thread(target=lambda: _open_when_waited_for(copying, before), daemon=True)
    opening.start()
    begin_save({"w": HeldTensor(torch.ones(1000), copying.pass_through)}, overlap_staging=True).result(WAIT)
    opening.join(WAIT)
    assert copying.opened.is_set()
    state = {"w": torch.zeros(1000)}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path))
    assert set(state["w"].tolist()) == {1.0}


def _open_when_waited_for(copying, before):
    copying.wait_reached()
    wait_until_inside(save_thread(before), StagedSave.wait_copied)
    copying.open()
