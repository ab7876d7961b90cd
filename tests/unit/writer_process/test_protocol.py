"""The messages between a trainer and its writer process: small, frozen, and equal on both sides."""

from __future__ import annotations

import pickle

import pytest

from dcp_tensorizer._runtime.channel import Done, Failed, Progress, Ready
from dcp_tensorizer._runtime.process_context import ProcessContext
from dcp_tensorizer._staging.shared_mappings import MappedFile
from dcp_tensorizer._tensor_file.encryption import Cipher
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer._writer_process.options import SaveOptions
from dcp_tensorizer._writer_process.protocol import (
    Call,
    DeviceTensor,
    DigestRequest,
    EarlierFile,
    FileRequest,
    FileResult,
    SnapshotRequest,
    TensorSource,
    WriteDone,
    WriteRequest,
)

FILE = MappedFile("/dev/shm/torch_1", 7, 4711)
SOURCES = (
    TensorSource("layer.0", "bfloat16", (3, 4), 24, memory=7, offset=4096),
    TensorSource("step", "uint8", (100,), 100, "object", FILE, 512),
)
OPTIONS = SaveOptions(
    storage_options={"key": "a-secret", "nested": {"a": [1]}}, thread_count=2, cipher=Cipher(bytes(range(32)))
)
REQUEST = WriteRequest("/checkpoint", OPTIONS, (FileRequest("__0_0_x.tensors", SOURCES),))
STORED = (
    StoredItem("f0", "layer.0", 262_300, 24, "bfloat16", "tensor", b"8" * 8),
    StoredItem("f0", "step", 262_400, 100, "uint8", "object", b"9" * 8),
)
DONE = WriteDone((FileResult("f0", 300_000, STORED), FileResult("f1", 5, ())), 1.5, 1.0, 0.5)
SNAPSHOT = SnapshotRequest(7, 0, (("a handle",),), (DeviceTensor(0, "float32", (3,), (1,), 0, False, False, 64),))


@pytest.mark.parametrize(
    "message",
    [
        REQUEST,
        SNAPSHOT,
        Call(None, (7, 8)),
        Call(REQUEST, (), ((7, 8192),), ProcessContext.here()),
        WriteRequest("/p", OPTIONS, (FileRequest("f1", SOURCES, (EarlierFile("/p", "f0", (7, 4711, 5)),), 300_000),)),
        WriteRequest("/p", OPTIONS, (FileRequest("f0", ()), FileRequest("f1", SOURCES[1:]))),
        DigestRequest(SOURCES, 2),
        WriteDone((FileResult("f1", 300_000, (), ("etag",), adopted=True),), 1.0, 0.5, 0.1),
        DONE,
        Done(),
        Ready(),
        Progress(12345678901),
        Failed("no space", "Traceback ..."),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_survive_pickling(message: object) -> None:
    """The other process gets equal values of the same types."""
    copy = pickle.loads(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
    assert copy == message
    assert type(copy) is type(message)


def test_where_a_tensor_is_keeps_its_type() -> None:
    """A number stands for a shared buffer, and a `MappedFile` for a file, which is pickled once for all tensors."""
    many = tuple(SOURCES[1]._replace(offset=n) for n in range(100))
    copy = pickle.loads(pickle.dumps(WriteRequest("/p", OPTIONS, (FileRequest("f", (*SOURCES, *many)),))))
    assert [type(source.memory) for source in copy.files[0].tensors[:2]] == [int, MappedFile]
    assert len({id(source.memory) for source in copy.files[0].tensors[1:]}) == 1


def test_messages_cannot_be_changed() -> None:
    """Messages are frozen, because a request may be sent again after a crash."""
    with pytest.raises(AttributeError):
        SOURCES[0].offset = 0  # type: ignore[misc]
    with pytest.raises(AttributeError):
        REQUEST.path = "/other"  # type: ignore[misc]


def test_a_request_shows_no_secrets() -> None:
    """The ``repr`` of a request, which may be logged, contains neither storage options nor the key."""
    for shown in (repr(REQUEST), repr(Call(REQUEST, ()))):
        assert "a-secret" not in shown
        assert repr(bytes(range(32))) not in shown


def test_results_are_found_by_name() -> None:
    """The items of a result are the locations of its tensors, by name."""
    assert DONE.items() == {"layer.0": STORED[0], "step": STORED[1]}
