"""Tests of saves and loads of encrypted checkpoints, in whole and in parts, on all kinds of storage."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

from dcp_tensorizer import (
    CheckpointError,
    ChecksumMismatch,
    DecryptionError,
    TensorizerStorageReader,
    TensorizerStorageWriter,
)
from dcp_tensorizer._formats.own import decode
from dcp_tensorizer._loading.plan import ReadTarget
from dcp_tensorizer._loading.run import fetch, limits_of
from dcp_tensorizer._saving import write_plan
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.open import open_storage
from dcp_tensorizer._tensor_file.encryption import Cipher
from dcp_tensorizer._tensor_file.names import StoredItem
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer.testing import put_file
from dcp_tensorizer.tools import convert, diff, inspect, report
from dcp_tensorizer.tools._formats.registry import open_checkpoint

from ...lab.index_edits import edit_index
from ...lab.processes import ROOT, run_python
from ...lab.seams import encrypted_file
from ...lab.servers import S3Server, SftpServer
from ...lab.states import ALL_DTYPES, dtype_name, filled, raw, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEY = bytes(range(32))
CIPHER = Cipher(KEY)
WEAK = {"opslimit": EncryptionParams.OpsLimit.MIN, "memlimit": EncryptionParams.MemLimit.MIN}  # quick


def read(storage: Storage, item: StoredItem, stored: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    """Reads a whole item, or the region that ``options`` names, into a target."""
    region = options.pop("region", Region((0,) * stored.ndim, tuple(stored.shape)))
    wanted = ReadTarget.of("t", item, tuple(stored.shape), region, target)
    fetch(storage, [wanted], **{"threads": 2, "verify": True, "cipher": CIPHER} | options)


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["passphrase", KEY, DecryptionParams.from_key(KEY)], ids=["str", "bytes", "other"])
def test_a_writer_takes_nothing_else_for_a_key(wrong: Any) -> None:
    """Anything but EncryptionParams is an error at once, which names the type and not the value."""
    with pytest.raises(TypeError, match="EncryptionParams") as caught:
        TensorizerStorageWriter(encryption=wrong)
    assert "passphrase" not in str(caught.value)
    assert repr(KEY) not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", ["passphrase", EncryptionParams(KEY), DecryptionParams()], ids=["str", "other", "empty"]
)
def test_a_reader_takes_nothing_else_for_a_key(wrong: Any) -> None:
    """Anything but DecryptionParams with a key is an error at once."""
    with pytest.raises(TypeError, match="DecryptionParams"):
        TensorizerStorageReader("nowhere", encryption=wrong)


@pytest.mark.parametrize("tool", [inspect, diff, report, convert])
def test_a_tool_takes_nothing_else_for_a_key(tmp_path: Path, tool: Callable[..., object]) -> None:
    """Anything but DecryptionParams is an error before data is decrypted or written."""
    with TensorizerStorageWriter(tmp_path / "step-1", encryption=EncryptionParams(KEY)) as writer:
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    path, to = tmp_path / "step-1", tmp_path / "output"
    arguments = {inspect: (path,), diff: (path, path), report: ([path], to), convert: (path, to, "safetensors")}
    with pytest.raises(TypeError, match=r"must be tensorizer\.DecryptionParams, got bytes"):
        tool(*arguments[tool], encryption=KEY)
    assert not to.exists()


def test_without_libsodium(tmp_path: Path) -> None:
    """Writers and readers with a key name what to install; others work."""
    pickled = pickle.dumps((EncryptionParams(KEY), DecryptionParams.from_key(KEY)))
    (tmp_path / "params").write_bytes(pickled)
    script = """
import ctypes, ctypes.util, pathlib, pickle, sys
found, loaded = ctypes.util.find_library, ctypes.cdll.LoadLibrary
def load(name):
    if "sodium" in name:
        raise OSError(f"{name}: cannot open shared object file")
    return loaded(name)
ctypes.util.find_library = lambda name: None if name == "sodium" else found(name)
ctypes.cdll.LoadLibrary = load
from dcp_tensorizer import DecryptionError, TensorizerStorageReader, TensorizerStorageWriter, WriteError
encryption, decryption = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
TensorizerStorageWriter().close()
TensorizerStorageReader("nowhere")
for make, kind in (
    (lambda: TensorizerStorageWriter(encryption=encryption), WriteError),
    (lambda: TensorizerStorageReader("nowhere", encryption=decryption), DecryptionError),
):
    try:
        make()
    except kind as error:
        print(error)
"""
    lines = run_python(script, str(tmp_path / "params"), fresh=True).stdout.splitlines()
    assert len(lines) == 2
    assert all("needs libsodium" in line and "apt-get install" in line for line in lines)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path)


@pytest.fixture(params=[True, False], ids=["verify", "trust"])
def verify(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_is_read_in_whole_and_in_parts(storage: Storage, dtype: torch.dtype, verify: bool) -> None:
    """Tensors are read into contiguous memory and as regions of several blocks, with and without digests."""
    stored = filled(dtype, (301, 703))
    content, items = encrypted_file({"t": stored}, CIPHER)
    put_file(storage, "f", content)
    target = filled(dtype, (301, 703), seed=1)
    read(storage, items["t"], stored, target, verify=verify)
    assert same(target, stored)
    region = Region((100, 50), (150, 500))
    part = filled(dtype, region.size, seed=1)
    read(storage, items["t"], stored, part, verify=verify, region=region)
    assert same(
        part, stored.view(torch.uint8)[100:250, 50 * dtype.itemsize : 550 * dtype.itemsize].contiguous().view(dtype)
    )


@settings(max_examples=60)
@given(data=st.data(), rows=st.integers(1, 60), columns=st.integers(1, 5000))
def test_any_region_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rows: int, columns: int
) -> None:
    """Regions that cut blocks are read bit-exact, also in operations of few blocks."""
    stored = filled(torch.float32, (rows, columns))
    first = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    size = data.draw(st.integers(1, rows - first[0])), data.draw(st.integers(1, columns - first[1]))
    storage = open_storage(tmp_path_factory.mktemp("region"))
    content, items = encrypted_file({"t": stored}, CIPHER)
    put_file(storage, "f", content, sync=False)
    target = torch.zeros(size)
    nbytes = data.draw(st.sampled_from([1 << 16, 8 << 20]))
    limits = limits_of(storage)._replace(max_scratch_bytes=nbytes, max_coalesced_bytes=nbytes)
    verify = data.draw(st.booleans())
    read(storage, items["t"], stored, target, verify=verify, region=Region(first, size), limits=limits)
    assert same(target, stored[first[0] : first[0] + size[0], first[1] : first[1] + size[1]].contiguous())


@pytest.mark.parametrize("rows", [3, 3000])
def test_tied_weights(storage: Storage, rows: int, verify: bool) -> None:
    """Two names of one memory have two nonces, and are not mistaken for each other."""
    stored = filled(torch.float32, (rows, 1000))
    content, items = encrypted_file({"embedding": stored, "head": stored}, CIPHER)
    put_file(storage, "f", content)
    target = torch.zeros(rows, 1000)
    shape = (rows, 1000)
    tied = [ReadTarget.of(key, items[key], shape, Region((0, 0), shape), target) for key in ("embedding", "head")]
    fetch(storage, tied, verify=verify, cipher=CIPHER)
    assert same(target, stored)


def test_a_slice_reads_its_blocks_and_no_others(storage: Storage) -> None:
    """A load of a few rows neither reads nor decrypts the other blocks."""
    stored = filled(torch.uint8, (64, 1 << 16))
    content, items = encrypted_file({"t": stored}, CIPHER)
    put_file(storage, "f", content)
    target = torch.zeros(2, 1 << 16, dtype=torch.uint8)
    region = Region((10, 0), (2, 1 << 16))
    rows = ReadTarget.of("t", items["t"], (64, 1 << 16), region, target)
    assert fetch(storage, [rows], threads=1, verify=False, cipher=CIPHER) == 2 << 16
    assert same(target, stored[10:12])


def test_every_damage_is_found(storage: Storage, tmp_path: Path, verify: bool) -> None:
    """Flipped bits raise ChecksumMismatch, by the digest or, without digests, by the MAC."""
    stored = filled(torch.uint8, (300_000,))
    content, items = encrypted_file({"t": stored}, CIPHER)
    item = items["t"]
    for position in (0, 65_535, 65_536, 150_000, 299_999):
        damaged = bytearray(content)
        damaged[item.offset + position] ^= 0x10
        (tmp_path / "f").write_bytes(damaged)
        block = position // item.block * item.block
        end = min(block + item.block, 300_000)
        with pytest.raises(ChecksumMismatch, match=rf"'t' in .*/f: bytes {block:,} to {end:,} of"):
            read(storage, item, stored, torch.zeros_like(stored), verify=verify)
    (tmp_path / "f").write_bytes(content)
    swapped = item._replace(
        digests=item.digests[::-1], nonce_and_macs=item.nonce_and_macs[:24] + item.nonce_and_macs[24:][::-1]
    )
    with pytest.raises(ChecksumMismatch):
        read(storage, swapped, stored, torch.zeros_like(stored), verify=verify)


def test_a_flip_of_any_byte_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips in `.metadata` and in data are errors; headers are not read by a load."""
    monkeypatch.setattr(write_plan, "INLINE_BYTES", 0)  # small values are read from the data file, too
    state = {"w": torch.arange(60.0).view(6, 10), "extra": {"name": "run"}}
    save(tmp_path, state)
    (file,) = tmp_path.glob("*.tensors")
    items = list(decode((tmp_path / ".metadata").read_bytes(), "m").storage_data["items"].values())
    read = {offset for item in items for offset in range(item.offset, item.offset + item.length)}
    headers = set(range(min(read) - 200, file.stat().st_size)) - read
    for path, offsets, harmless in (
        (tmp_path / ".metadata", range((tmp_path / ".metadata").stat().st_size), False),
        (file, sorted(read)[::7], False),
        (file, sorted(headers)[::7], True),
    ):
        content = path.read_bytes()
        for offset in offsets:
            path.write_bytes(content[:offset] + bytes([content[offset] ^ 4]) + content[offset + 1 :])
            assert (load(tmp_path) == state_of(state)) if harmless else isinstance(load(tmp_path), CheckpointError)
        path.write_bytes(content)
    assert load(tmp_path) == state_of(state)


def test_small_values_in_the_index_are_encrypted(tmp_path: Path) -> None:
    """The values load from the index, which does not contain their plain bytes."""
    state = {"w": torch.arange(60.0).view(6, 10), "extra": {"name": "a secret name"}}
    save(tmp_path, state)
    (file,) = tmp_path.glob("*.tensors")
    file.write_bytes(bytes(file.stat().st_size))
    assert load(tmp_path) == state_of(state)
    index = (tmp_path / ".metadata").read_bytes()
    assert b"a secret name" not in index
    assert state["w"].numpy().tobytes()[:16] not in index


def _number(rows: Any, key: str) -> int:
    return [entry.key for entry in rows.entries].index(key)


def _shape(rows: Any) -> None:
    _reshape(rows, (2, 8207))


def _reshape(rows: Any, shape: tuple[int, ...]) -> None:
    rows.layouts[rows.entries[_number(rows, "w")].layout].shape = shape


def _dtype(rows: Any) -> None:
    rows.dtypes[rows.dtypes.index("float32")] = "int32"


def _changed(column: bytes, dtype: str, row: int, number: int) -> bytes:
    numbers = np.frombuffer(column, dtype=dtype).copy()
    numbers[row] = number
    return numbers.tobytes()


def _last_blocks(rows: Any) -> None:
    """Cuts a tensor of two blocks to the second one, with its own offset, nonce and MAC."""
    sizes, offsets = np.frombuffer(rows.sizes, "<i8"), np.frombuffer(rows.offsets, "<i8")
    row = int(sizes.argmax())
    rows.offsets = _changed(rows.offsets, "<i8", row, int(offsets[row]) + 65_536)
    rows.sizes = _changed(rows.sizes, "<i8", row, int(sizes[row]) - 65_536)
    rows.digests = _cut(rows, "digest_sizes", "digests", row, lambda of: of[8:16])

    def second(seal: bytes) -> bytes:
        counted = (int.from_bytes(seal[:24], "little") + 1).to_bytes(24, "little")
        return counted + seal[24 + 16 :]

    rows.seals = _cut(rows, "seal_sizes", "seals", row, second)


def _cut(rows: Any, sizes: str, content: str, row: int, change: Callable[[bytes], bytes]) -> bytes:
    """Returns the bytes of all items, with other bytes for one, whose size changes."""
    column = getattr(rows, sizes)
    ends = [0, *np.cumsum(np.frombuffer(column, "<u4")).tolist()]
    before, own, after = (
        getattr(rows, content)[slice(*pair)] for pair in ((0, ends[row]), ends[row : row + 2], (ends[row + 1], None))
    )
    setattr(rows, sizes, _changed(column, "<u4", row, len(change(own))))
    return before + change(own) + after


def _cut_shape(rows: Any) -> None:
    """Returns the shape of the result of `_last_blocks`."""
    _reshape(rows, (15, 2))


def _kind(rows: Any) -> None:
    rows.kinds = bytes(int(dtype == rows.dtypes.index("uint8")) for dtype in rows.dtype_numbers)


def _key(rows: Any) -> None:
    first, second = rows.entries[_number(rows, "b")], rows.entries[_number(rows, "v")]
    first.key, second.key = second.key, first.key


def _place(rows: Any) -> None:
    first, second, *_ = np.frombuffer(rows.hashes, "<u8").tolist()
    rows.hashes = _changed(_changed(rows.hashes, "<u8", 0, second), "<u8", 1, first)


@pytest.mark.promise("sealed-index-changed")
@pytest.mark.parametrize(
    "edits",
    [
        [("entries", _shape)],
        [("places", _dtype)],
        [("places", _last_blocks), ("entries", _cut_shape)],
        [("places", _kind)],
        [("entries", _key)],
        [("places", _place)],
        [("head", lambda head: setattr(head, "saved_at", 0))],
    ],
    ids=["shape", "dtype", "last blocks", "kind", "key", "place", "time"],
)
def test_an_edit_of_the_metadata_alone(tmp_path: Path, edits: list[Any]) -> None:
    """Without the key every digest can be forged, but not the MAC: no target changes."""
    state = {"w": torch.arange(16_414.0).view(-1, 2), "v": torch.ones(3), "b": torch.ones(3, dtype=torch.uint8)}
    save(tmp_path, state)
    for kind, change in edits:
        edit_index(tmp_path / ".metadata", kind, change)
    metadata = decode((tmp_path / ".metadata").read_bytes(), "m")  # without the key, it looks whole
    target = {key: torch.full(tuple(metadata.state_dict_metadata[key].size), -1.0) for key in state}
    reader = TensorizerStorageReader(tmp_path, encryption=DecryptionParams.from_key(KEY))
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=reader)
    assert "its metadata was changed without its key" in str(caught.value.failures[0][0])
    assert isinstance(caught.value.failures[0][0], DecryptionError)
    assert all((tensor == -1).all() for tensor in target.values())
    with pytest.raises(DecryptionError, match="changed without its key"):
        open_checkpoint(tmp_path, {}, encryption=DecryptionParams.from_key(KEY))


def test_one_reader_derives_a_key_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deriving a key is slow on purpose, so a reader of several checkpoints does it once."""
    params = EncryptionParams.from_string("correct horse", **WEAK)
    for name in "ab":
        save(tmp_path / name, {"w": torch.ones(3)}, params)
    derived = []
    derive = EncryptionParams.from_string
    monkeypatch.setattr(EncryptionParams, "from_string", lambda *a, **k: derived.append(k["salt"]) or derive(*a, **k))
    reader = TensorizerStorageReader(tmp_path / "a", encryption=DecryptionParams.from_string("correct horse"))
    for name in "ab":
        target = {"w": torch.zeros(3)}
        dcp.load(target, storage_reader=reader, checkpoint_id=tmp_path / name)
        assert target["w"].tolist() == [1.0] * 3
    assert derived == [params.salt]


def test_wrapper_subclasses_are_encrypted(tmp_path: Path) -> None:
    """The `torch.save` bytes of a tensor without storage are encrypted, and load."""
    inner = filled(torch.float32, (50,)), filled(torch.float32, (50,), seed=1)
    params = EncryptionParams(KEY)
    for folder, encryption in (("plain", None), ("encrypted", params)):
        save(tmp_path / folder, {"pair": TwoTensor(*inner)}, encryption)
    shown = {
        f: [raw(inner[0])[:16] in p.read_bytes() for p in (tmp_path / f).glob("*.tensors")]
        for f in ("plain", "encrypted")
    }
    assert shown == {"plain": [True], "encrypted": [False]}
    target = {"pair": TwoTensor(torch.zeros(50), torch.zeros(50))}
    key = DecryptionParams.from_key(KEY)
    dcp.load(target, storage_reader=TensorizerStorageReader(tmp_path / "encrypted", encryption=key, allow_pickle=True))
    assert same(target["pair"].a, inner[0])
    assert same(target["pair"].b, inner[1])


def save(path: Path, state: dict[str, Any], encryption: Any = KEY) -> None:
    encryption = EncryptionParams(encryption) if isinstance(encryption, bytes) else encryption
    with TensorizerStorageWriter(path, encryption=encryption) as writer:
        dcp.save(state, storage_writer=writer)


def load(path: Path) -> Any:
    """Returns the contents of the checkpoint as plain values, or the error."""
    state = {"w": torch.zeros(6, 10), "extra": {"name": ""}}
    reader = TensorizerStorageReader(path, encryption=DecryptionParams.from_key(KEY))
    try:
        dcp.load(state, storage_reader=reader)
    except CheckpointException as error:
        return error.failures[0][0]
    return state_of(state)


def state_of(state: dict[str, Any]) -> Any:
    return state["w"].tolist(), state["extra"]


@pytest.mark.parametrize("protocol", ["s3", "sftp"])
def test_remote_checkpoints_are_encrypted(s3: S3Server, sftp: SftpServer, tmp_path: Path, protocol: str) -> None:
    """Parts in any order, and one stream, contain no plain bytes, and load resharded."""
    tensor = filled(torch.float32, (3000, 1000))
    params, name = EncryptionParams(KEY), f"encrypted-{tmp_path.name}"
    url = f"s3://{s3.bucket}/{name}" if protocol == "s3" else f"sftp://127.0.0.1/{name}"
    options = s3.options() if protocol == "s3" else sftp.options()
    with TensorizerStorageWriter(url, encryption=params, storage_options=options) as writer:
        dcp.async_save({"w": tensor, "text": "known" * 100}, storage_writer=writer).result()
    if protocol == "s3":
        keys = [f"{name}/{key}" for key in s3.objects(name)]
        stored = [s3.client().get_object(Bucket=s3.bucket, Key=key)["Body"].read() for key in keys]
    else:
        stored = [path.read_bytes() for path in (sftp.folder / name).iterdir()]
    data = raw(tensor)
    known = [data[start : start + 16] for start in range(0, len(data) - 16, 100_003)] + [b"knownknownknownk"]
    assert len(stored) == 2
    assert not [part for part in known if any(part in content for content in stored)]
    loaded = {"w": torch.zeros(3000, 1000), "text": ""}
    key = DecryptionParams.from_key(KEY)
    dcp.load(loaded, storage_reader=TensorizerStorageReader(url, encryption=key, storage_options=options))
    assert same(loaded["w"], tensor)
    assert loaded["text"] == "known" * 100


def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    """The example's key file is private to its owner, and the load returns what was saved."""
    example = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "encryption.md").read_text(), re.DOTALL)[0]
    check = "\nassert torch.equal(loaded['weight'], state_dict['weight'])\nassert loaded['step'] == 7\n"
    run_python(f"import os\nos.chdir({str(tmp_path)!r})\n{example}{check}")
    assert (tmp_path / "checkpoint.key").stat().st_mode & 0o777 == 0o600
    key = (tmp_path / "checkpoint.key").read_bytes()
    (file,) = (tmp_path / "checkpoint").glob("*.tensors")
    decryption = DecryptionParams.from_key(key)
    with TensorDeserializer(file, device="cpu", encryption=decryption, verify_hash=True) as loaded:
        assert same(loaded["weight"].detach(), torch.arange(12.0).view(3, 4))
