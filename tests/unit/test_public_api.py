"""What users and torch rely on: names, signatures, the exception tree."""

from __future__ import annotations

import importlib.metadata
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import dcp_tensorizer
from dcp_tensorizer import (
    CheckpointError,
    CheckpointManager,
    ChecksumMismatch,
    ConversionError,
    CopyOptions,
    DecryptionError,
    Export,
    LoadPlanner,
    MetadataError,
    NotCommitted,
    ReadError,
    SafetensorsStorageWriter,
    SaveLimits,
    SavePlanner,
    StagingError,
    StateMismatch,
    TensorizerStorageReader,
    TensorizerStorageWriter,
    UnsupportedFormat,
    UntrustedObject,
    WriteError,
    WriterProcessDied,
    errors,
    open_reader,
    storage,
    testing,
)
from dcp_tensorizer.manager import GoodputReport
from dcp_tensorizer.reader import LoadReport, ReaderOptions
from dcp_tensorizer.writer import SaveReport, WriterOptions

EXCEPTIONS = [
    CheckpointError,
    ChecksumMismatch,
    ConversionError,
    DecryptionError,
    MetadataError,
    NotCommitted,
    ReadError,
    StagingError,
    StateMismatch,
    UnsupportedFormat,
    UntrustedObject,
    WriteError,
    WriterProcessDied,
]


def test_exported_names_are_pinned() -> None:
    """Adding or removing a public name is a decision, not an accident."""
    assert dcp_tensorizer.__all__ == [
        "CheckpointError",
        "CheckpointManager",
        "ChecksumMismatch",
        "ConversionError",
        "CopyOptions",
        "DecryptionError",
        "Export",
        "LoadPlanner",
        "MetadataError",
        "NotCommitted",
        "Parts",
        "Publish",
        "ReadError",
        "SafetensorsStorageWriter",
        "SaveLimits",
        "SavePlanner",
        "StagingError",
        "StateMismatch",
        "TensorizerStorageReader",
        "TensorizerStorageWriter",
        "UnsupportedFormat",
        "UntrustedObject",
        "WriteError",
        "WriterProcessDied",
        "__version__",
        "apply_delta",
        "install",
        "installed",
        "open_reader",
        "publish",
        "uninstall",
        "unwrap",
    ]
    assert [name for name in dcp_tensorizer.__all__ if not hasattr(dcp_tensorizer, name)] == []


def test_the_names_for_authors_of_storages_are_pinned() -> None:
    """Other packages build on them."""
    assert storage.__all__ == [
        "FileInfo",
        "Opener",
        "RangeReader",
        "Ranges",
        "ReadTuning",
        "Refused",
        "RemoteStorage",
        "Scrubber",
        "Sink",
        "Storage",
        "open_storage",
    ]
    assert testing.__all__ == ["StorageTests", "on_a_page", "put_file"]


def test_what_an_author_of_a_storage_must_write_is_pinned() -> None:
    """Another abstract method breaks every storage of other packages: a new one needs a default."""
    assert storage.RemoteStorage.__abstractmethods__ == {"create", "open", "remove", "_read", "_head", "_list"}
    assert storage.Sink.__abstractmethods__ == {"_put_part", "_complete", "_abort"}
    assert storage.RangeReader.__abstractmethods__ == {"read_into"}


def test_version_is_that_of_the_installed_distribution() -> None:
    """``__version__`` and the package's metadata agree."""
    assert dcp_tensorizer.__version__ == importlib.metadata.version("dcp_tensorizer")


@pytest.mark.parametrize(
    "method",
    [
        TensorizerStorageWriter.set_up_storage_writer,
        TensorizerStorageReader.set_up_storage_reader,
        TensorizerStorageReader.read_metadata,
    ],
    ids=lambda method: method.__name__,
)
def test_torch_finds_a_parameter_named_kwargs(method: object) -> None:
    """torch passes rank and use_collectives only to methods with a parameter of literally that name."""
    parameter = inspect.signature(method).parameters["kwargs"]  # type: ignore[arg-type]
    assert parameter.kind is inspect.Parameter.VAR_KEYWORD


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (TensorizerStorageWriter, StorageWriter),
        (SafetensorsStorageWriter, StorageWriter),
        (TensorizerStorageReader, StorageReader),
    ],
    ids=["writer", "models", "reader"],
)
def test_overridden_methods_take_what_torch_passes(ours: type, theirs: type) -> None:
    """Each method of torch's interface can be called here with the same positional arguments and names."""
    for name, method in inspect.getmembers(theirs, inspect.isfunction):
        if name.startswith("_"):
            continue
        expected = [p for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        actual = list(inspect.signature(getattr(ours, name)).parameters.values())
        assert [p.name for p in actual[: len(expected)]] == [p.name for p in expected], name
        assert not [p for p in actual[len(expected) :] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize(
    ("options", "cls", "others"),
    [
        (WriterOptions, TensorizerStorageWriter, {"path"}),
        (ReaderOptions, TensorizerStorageReader, {"path"}),
    ],
    ids=["writer", "reader"],
)
def test_options_that_are_passed_on_are_known_to_type_checkers(options: type, cls: type, others: set[str]) -> None:
    """By the same names and types, so that a slip of the pen is seen before the job runs."""
    parameters = inspect.signature(cls).parameters
    expected = {name: parameter.annotation for name, parameter in parameters.items() if name not in others}
    assert {name: kind.__forward_arg__ for name, kind in options.__annotations__.items()} == expected


def test_the_arguments_of_the_writer_are_pinned() -> None:
    """Their order too: only the path may be given without its name."""
    parameters = inspect.signature(TensorizerStorageWriter).parameters.values()
    assert [(p.name, p.default) for p in parameters] == [
        ("path", None),
        ("cache_staged_state_dict", True),
        ("staging", "buffer"),
        ("overlap_staging", False),
        ("overwrite", True),
        ("sync_files", True),
        ("thread_count", None),
        ("storage_options", None),
        ("sha256", False),
        ("reuse_unchanged", False),
        ("encryption", None),
        ("on_report", None),
        ("on_progress", None),
        ("limits", SaveLimits()),
        ("local", None),
        ("max_unflushed", 3),
    ]
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["path"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": 7}, TypeError, "path must be a str or an os.PathLike, got int."),
        ({"staging": "disk"}, ValueError, "staging must be one of 'buffer', 'device', 'shared', got 'disk'."),
        ({"thread_count": 0}, ValueError, "thread_count must be an int of at least 1, or None, got 0."),
        ({"storage_options": ["a"]}, TypeError, "storage_options must be a mapping, or None, got list."),
        ({"encryption": "key"}, TypeError, "encryption must be tensorizer.EncryptionParams, got str"),
        ({"on_report": "print"}, TypeError, "on_report must be callable, or None, got str."),
        ({"on_progress": "print"}, TypeError, "on_progress must be callable, or None, got str."),
        ({"limits": 600.0}, TypeError, "limits must be an instance of SaveLimits, got float."),
        ({"local": 7, "path": "/a"}, TypeError, "local must be a str or an os.PathLike, got int"),
        ({"local": "/b"}, ValueError, "local= requires path=, the folder that it mirrors. Pass both"),
        (
            {"local": "/a/b", "path": "/a"},
            ValueError,
            "local='/a/b' and path='/a' must not contain each other",
        ),
        (
            {"local": "s3://b", "path": "/a"},
            ValueError,
            "local must be a local folder, got a URL",
        ),
        ({"max_unflushed": 0}, ValueError, "max_unflushed must be an int of at least 1, got 0."),
        (
            {"max_unflushed": 2},
            ValueError,
            "max_unflushed requires local=, the folder whose checkpoints it counts. Pass both",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_writer_checks_its_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each error names the argument, the value and what is allowed, and no process is started."""
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        TensorizerStorageWriter(**arguments)


def flags_of(made: Callable[..., object]) -> list[Any]:
    """The arguments of a class or function that are booleans."""
    parameters = inspect.signature(made).parameters.values()
    return [pytest.param(made, p.name, id=p.name) for p in parameters if p.annotation in ("bool", "bool | None")]


@pytest.mark.parametrize(
    ("made", "name"),
    [
        flag
        for made in (
            *(TensorizerStorageWriter, SafetensorsStorageWriter, Export),
            *(TensorizerStorageReader, open_reader, CheckpointManager),
        )
        for flag in flags_of(made)
    ],
)
@pytest.mark.parametrize("value", ["no", 0, "None"])
def test_flags_are_booleans(tmp_path: Path, made: Callable[..., object], name: str, value: object) -> None:
    """Text such as "no" would count as true."""
    with pytest.raises(TypeError, match=rf"^{name} must be True.* or .*, got {value!r}\.$"):
        made(tmp_path, **{name: value})


def test_the_writer_is_a_stager_and_a_storage_writer() -> None:
    """``dcp.async_save`` looks for an AsyncStager with ``isinstance``, which checks the protocol's members."""
    with TensorizerStorageWriter() as writer:
        assert isinstance(writer, StorageWriter)
        assert isinstance(writer, AsyncStager)
        assert writer.should_synchronize_after_execute is False


def test_the_reader_is_a_storage_reader() -> None:
    """``dcp.load`` takes it as its storage reader."""
    assert isinstance(TensorizerStorageReader("nowhere"), StorageReader)


def _tree(cls: type) -> dict[str, object]:
    return {child.__name__: _tree(child) for child in cls.__subclasses__() if child.__module__ == errors.__name__}


def test_the_exception_tree_is_the_one_in_the_docstring() -> None:
    """The drawing at the top of errors.py is true."""
    assert _tree(CheckpointError) == {
        "StagingError": {},
        "WriteError": {"WriterProcessDied": {}},
        "ReadError": {"ChecksumMismatch": {}, "DecryptionError": {}},
        "MetadataError": {"NotCommitted": {}, "StateMismatch": {}, "UnsupportedFormat": {}, "UntrustedObject": {}},
        "ConversionError": {},
    }
    drawn = [line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert sorted([*drawn, "CheckpointError", "unwrap"]) == sorted(errors.__all__)


@pytest.mark.parametrize("cls", EXCEPTIONS, ids=lambda cls: cls.__name__)
def test_exceptions_survive_pickling(cls: type[CheckpointError]) -> None:
    """DCP hands errors from rank to rank: type and message arrive."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(cls("rank 3: 'layer.0' and why: \N{SNOWMAN}"), protocol))
        assert type(copy) is cls
        assert str(copy) == "rank 3: 'layer.0' and why: \N{SNOWMAN}"
        assert isinstance(copy, Exception)


def test_not_committed_is_a_file_not_found_error() -> None:
    """Code that looks for a checkpoint to resume from catches what it catches for any missing file."""
    assert issubclass(NotCommitted, FileNotFoundError)
    assert str(NotCommitted("no checkpoint")) == "no checkpoint"


@pytest.mark.parametrize(
    "cls",
    [
        CheckpointManager,
        CopyOptions,
        Export,
        GoodputReport,
        LoadPlanner,
        LoadReport,
        SafetensorsStorageWriter,
        SaveLimits,
        SavePlanner,
        SaveReport,
        TensorizerStorageReader,
        TensorizerStorageWriter,
        *EXCEPTIONS,
    ],
    ids=lambda c: c.__name__,
)
def test_everything_public_is_documented(cls: type) -> None:
    """Each public class, and each public method that it defines, has a docstring of its own."""
    assert cls.__doc__
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if inspect.ismemberdescriptor(member):
            continue  # a field: its class's docstring describes it
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        assert function.__doc__, f"{cls.__name__}.{name}"
