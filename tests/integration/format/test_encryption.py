"""Keys and ciphers are tensorizer's, files of ours open in stock tensorizer, and only copies are ever encrypted."""

from __future__ import annotations

import functools
import hashlib
import mmap
import pickle
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, _crypt, _crypt_info
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.two_tensor import TwoTensor

from dcp_tensorizer import (
    CheckpointError,
    ChecksumMismatch,
    DecryptionError,
    TensorizerStorageReader,
    TensorizerStorageWriter,
)
from dcp_tensorizer._format import layout as layout_module
from dcp_tensorizer._format.chunks import Region
from dcp_tensorizer._format.encoder import encode
from dcp_tensorizer._format.encryption import Cipher, encryption_cipher, find_other_key, random_nonce, unlock
from dcp_tensorizer._format.layout import Derivation, StoredItem, block_size
from dcp_tensorizer._format.metadata import decode
from dcp_tensorizer._format.tensorizer_file import lay_out
from dcp_tensorizer._loading.executor import fetch, limits_of
from dcp_tensorizer._loading.read_target import ReadTarget
from dcp_tensorizer._memory.tensor_bytes import host_bytes
from dcp_tensorizer._storage.base import Storage
from dcp_tensorizer._storage.open import open_storage

from ...servers import S3Server, SftpServer
from ...support import ALL_DTYPES, ROOT, BufferSink, dtype_name, filled, put_file, raw, run_python, same, sources

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEY = bytes(range(32))
CIPHER = Cipher(KEY)
WEAK = {"opslimit": EncryptionParams.OpsLimit.MIN, "memlimit": EncryptionParams.MemLimit.MIN}  # quick
NONCES = st.binary(min_size=24, max_size=24)

Tensors = dict[str, torch.Tensor]


def encrypted(
    tensors: Tensors, cipher: Cipher, threads: int = 1, part_bytes: int = 1 << 20, *, in_order: bool = False
) -> tuple[bytes, Any]:
    """A whole file, and its items."""
    sink = BufferSink(part_bytes, in_order=in_order)
    described = sources(tensors.items())
    layout = lay_out(described, cipher)
    contents = [functools.partial(host_bytes, tensor) for tensor in tensors.values()]
    found = encode(layout, contents, sink, threads)
    assert len(sink.content) == layout.nbytes
    items = {
        source.name: StoredItem("f", source.name, entry.offset, entry.length, source.dtype, "tensor", *encoded)
        for source, entry, encoded in zip(described, layout.entries, found, strict=True)
    }
    return sink.content, items


def read(storage: Storage, item: StoredItem, stored: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    """Reads a whole item, or the region that ``options`` names, into a target."""
    region = options.pop("region", Region((0,) * stored.ndim, tuple(stored.shape)))
    wanted = ReadTarget.of("t", item, tuple(stored.shape), region, target)
    fetch(storage, [wanted], **{"threads": 2, "verify": True, "cipher": CIPHER} | options)


# --- the cipher ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(data=st.binary(min_size=1, max_size=5000), nonce=NONCES, key=st.binary(min_size=32, max_size=32))
def test_blocks_are_encrypted_as_tensorizer_encrypts_chunks(data: bytes, nonce: bytes, key: bytes) -> None:
    """Bytes, MACs and the count of nonces are those of its own cipher, and each opens what the other closed."""
    step = 1024
    theirs = bytearray(data)
    count = -(-len(data) // step)
    nonces = list(_crypt.ChunkedEncryption.sequential_nonces(nonce, count))
    with _crypt.ChunkedEncryption(key, theirs, step, nonces, num_threads=1) as chunked:
        chunked.encrypt_all(wait=True)
    ours = bytearray(len(data))
    macs = []
    for number in range(count):
        source = memoryview(data)[number * step : (number + 1) * step]
        target = memoryview(ours)[number * step : (number + 1) * step]
        macs.append(Cipher(key).encrypt(source, target, nonce, number))
    assert ours == theirs
    assert macs == [bytes(mac) for mac in chunked.macs]
    for number in range(count):
        block = memoryview(theirs)[number * step : (number + 1) * step]
        assert Cipher(key).decrypt(block, nonce + b"".join(macs), number)
    assert theirs == data


def test_what_is_not_what_was_encrypted_stays_as_it_is() -> None:
    """A changed bit of data, nonce or MAC, another key, another block's number: nothing is decrypted."""
    block = bytearray(1000)
    nonce = random_nonce()
    nonce_and_macs = nonce + CIPHER.encrypt(memoryview(bytes(1000)), memoryview(block), nonce, 0)
    before = bytes(block)
    for position in range(len(nonce_and_macs)):
        changed = bytearray(nonce_and_macs)
        changed[position] ^= 1
        assert not CIPHER.decrypt(memoryview(block), bytes(changed), 0)
    assert not Cipher(bytes(32)).decrypt(memoryview(block), nonce_and_macs, 0)
    assert not CIPHER.decrypt(memoryview(block), nonce_and_macs, 1)
    assert not CIPHER.decrypt(memoryview(block), nonce_and_macs[:-1], 0)
    assert block == before
    block[7] ^= 1
    assert not CIPHER.decrypt(memoryview(block), nonce_and_macs, 0)
    block[7] ^= 1
    assert CIPHER.decrypt(memoryview(block), nonce_and_macs, 0)
    assert block == bytes(1000)


def test_a_check_value_tells_keys_apart_and_says_nothing_else() -> None:
    """It opens with its own key only, and no two are the same; what is cut or foreign opens with none."""
    check = CIPHER.check_value()
    assert CIPHER.opens(check)
    assert not Cipher(KEY[::-1]).opens(check)
    assert CIPHER.check_value() != check
    assert KEY not in check
    assert [CIPHER.opens(check[:length]) for length in range(len(check))] == [False] * len(check)


def test_ranks_with_other_keys_are_found() -> None:
    """The first whose key is another one, or missing, or superfluous."""
    ours, other = CIPHER.check_value(), Cipher(bytes(32)).check_value()
    assert find_other_key(CIPHER, [(0, ours), (2, CIPHER.check_value())]) is None
    assert find_other_key(CIPHER, [(0, ours), (2, other), (3, b"")]) == 2
    assert find_other_key(CIPHER, [(0, ours), (3, b"")]) == 3
    assert find_other_key(None, [(0, b""), (1, b"")]) is None
    assert find_other_key(None, [(0, b""), (1, ours)]) == 1


def test_a_key_is_in_no_repr() -> None:
    """Neither the key nor what holds it shows it; a copy that was pickled has it."""
    cipher = encryption_cipher(EncryptionParams.from_string("passphrase", **WEAK))
    assert repr(cipher.key) not in repr(cipher)
    assert cipher.key.hex() not in repr(cipher)
    assert "Derivation" in repr(cipher)
    assert pickle.loads(pickle.dumps(cipher)) == cipher


# --- tensorizer's parameters -----------------------------------------------------------------------------------------


def test_keys_of_all_kinds(tmp_path: Path) -> None:
    """Random, given as bytes, read from a file, or from a passphrase: the same key on both sides."""
    random = EncryptionParams.random()
    assert encryption_cipher(random) == Cipher(random.key)
    assert unlock(DecryptionParams.from_key(random.key), Cipher(random.key).record(), "/c") == Cipher(random.key)
    (tmp_path / "key").write_bytes(random.key)
    assert encryption_cipher(EncryptionParams((tmp_path / "key").read_bytes())) == Cipher(random.key)
    made = EncryptionParams.from_string("correct horse", **WEAK, salt=b"sixteen of salt.")
    cipher = encryption_cipher(made)
    assert cipher == Cipher(made.key, Derivation(1, 8192, 2, b"sixteen of salt."))
    assert [type(value) for value in cipher.derivation or ()] == [int, int, int, bytes]
    assert unlock(DecryptionParams.from_string("correct horse"), cipher.record(), "/c") == cipher
    assert unlock(DecryptionParams.from_key(made.key), cipher.record(), "/c") == Cipher(made.key)
    with pytest.raises(DecryptionError, match="/c was encrypted with another key"):
        unlock(DecryptionParams.from_string("other horse"), cipher.record(), "/c")


def test_a_passphrase_for_what_was_encrypted_with_a_key() -> None:
    """The error says which of tensorizer's constructors to use."""
    with pytest.raises(DecryptionError, match="from_key"):
        unlock(DecryptionParams.from_string("passphrase"), Cipher(KEY).record(), "/c")


def test_a_derivation_that_cannot_be_carried_out() -> None:
    """More memory than there is: an error that says how much, and not the passphrase."""
    with pytest.raises(DecryptionError, match=r"1,000,000,000,000,000 bytes") as caught:
        unlock(
            DecryptionParams.from_string("passphrase"),
            Cipher(KEY, Derivation(1, 10**15, 2, bytes(16))).record(),
            "/c",
        )
    assert "passphrase'" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["passphrase", KEY, DecryptionParams.from_key(KEY)], ids=["str", "bytes", "other"])
def test_a_writer_takes_nothing_else_for_a_key(wrong: Any) -> None:
    """What is no EncryptionParams is refused at once, by type and not by value."""
    with pytest.raises(TypeError, match="EncryptionParams") as caught:
        TensorizerStorageWriter(encryption=wrong)
    assert "passphrase" not in str(caught.value)
    assert repr(KEY) not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", ["passphrase", EncryptionParams(KEY), DecryptionParams()], ids=["str", "other", "empty"]
)
def test_a_reader_takes_nothing_else_for_a_key(wrong: Any) -> None:
    """What is no DecryptionParams, or one without a key, is refused at once."""
    with pytest.raises(TypeError, match="DecryptionParams"):
        TensorizerStorageReader("nowhere", encryption=wrong)


def test_without_libsodium(tmp_path: Path) -> None:
    """Where the system has none, writers and readers with a key say what to install; those without one work."""
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
    lines = run_python(script, str(tmp_path / "params")).stdout.splitlines()
    assert len(lines) == 2
    assert all("needs libsodium" in line and "apt-get install" in line for line in lines)


# --- files -----------------------------------------------------------------------------------------------------------


def open_stock(path: Path, decryption: Any = None) -> TensorDeserializer:
    decryption = decryption or DecryptionParams.from_key(KEY)
    return TensorDeserializer(path, device="cpu", encryption=decryption, verify_hash=True)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_stock_tensorizer_decrypts_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bit-exact: 0-dim, one element, several dimensions, several blocks of which the last is shorter."""
    many = filled(dtype, (200_001,))
    tensors = {
        "scalar": filled(dtype, ()),
        "one": filled(dtype, (1,)),
        "region": filled(dtype, (3, 4, 5)),
        "many": many,
    }
    (tmp_path / "f").write_bytes(encrypted(tensors, CIPHER)[0])
    with open_stock(tmp_path / "f") as loaded:
        assert list(loaded.keys()) == list(tensors)
        assert [name for name, tensor in tensors.items() if not same(loaded[name], tensor)] == []


def test_stock_tensorizer_derives_the_key_from_a_passphrase(tmp_path: Path) -> None:
    """Costs and salt are in each header, as it writes them."""
    cipher = encryption_cipher(EncryptionParams.from_string("correct horse", **WEAK))
    tensors = {"a": filled(torch.float32, (70_000,)), "b": filled(torch.bfloat16, (7,))}
    (tmp_path / "f").write_bytes(encrypted(tensors, cipher)[0])
    with open_stock(tmp_path / "f", DecryptionParams.from_string("correct horse")) as loaded:
        assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("derivation", [None, Derivation(1, 8192, 2, b"sixteen of salt.")], ids=["key", "passphrase"])
@pytest.mark.parametrize("shape", [(3,), (300_000,)])
def test_headers_say_what_tensorizers_own_say(derivation: Derivation | None, shape: tuple[int, ...]) -> None:
    """Its own code makes the same bytes of the same values; and there is no hash of what was encrypted."""
    tensor = filled(torch.float32, shape)
    content, items = encrypted({"t": tensor}, Cipher(KEY, derivation))
    (item,) = items.values()
    macs = [item.nonce_and_macs[start : start + 16] for start in range(24, len(item.nonce_and_macs), 16)]
    chunks: list[Any] = [] if derivation is None else [_crypt_info.PWHashKeyDerivationChunk(*derivation)]
    chunks.append(_crypt_info.XSalsa20ParallelChunk(item.block, item.nonce_and_macs[:24], macs))
    info = _crypt_info.CryptInfo(chunks)
    expected = bytearray(info.sized_size)
    info.sized_pack_into(expected, 0)
    (laid_out,) = lay_out(sources([("t", tensor)]), Cipher(KEY, derivation)).entries
    header_end = item.offset - 8 - laid_out.padding
    assert content[header_end : item.offset - 8] == bytes(laid_out.padding)
    assert content[header_end - len(expected) : header_end] == expected
    assert content[header_end - len(expected) - 3 : header_end - len(expected)] == b"\1\0\0"
    (entry,) = lay_out(sources([("t", tensor)])).entries
    assert hashlib.sha256(entry.header + raw(tensor)).digest() not in content


def test_heads_are_tensorizers_own(tmp_path: Path) -> None:
    """Version and flags are those that it writes into encrypted files, whatever dtypes they hold."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {"t": filled(dtype, (10,))}
        serializer = TensorSerializer(tmp_path / "stock", encryption=EncryptionParams(KEY))
        serializer.write_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
        serializer.close()
        theirs = (tmp_path / "stock").read_bytes()
        assert encrypted(tensors, CIPHER)[0][:41] == theirs[:41]
    huge = sources([("t", torch.empty(0))])[0].__class__("t", "uint8", (1 << 33,), 0, 0, 1 << 33)
    assert lay_out([huge], CIPHER).head[5:10] == b"\5\0\0\0\3"  # version; encrypted, and a versioned index


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 300_000), max_size=6),
    threads=st.integers(1, 5),
    part_bytes=st.sampled_from([4096, 1 << 16, 1 << 20]),
    in_order=st.booleans(),
)
def test_any_number_of_threads_and_parts(lengths: list[int], threads: int, part_bytes: int, in_order: bool) -> None:
    """Every block decrypts to what it was, is digested as it is stored, and no two have one nonce."""
    tensors = {f"{n}": filled(torch.uint8, (length,), n) for n, length in enumerate(lengths)}
    content, items = encrypted(tensors, CIPHER, threads, part_bytes, in_order=in_order)
    nonces = set()
    for item, tensor in zip(items.values(), tensors.values(), strict=True):
        data = bytearray(content[item.offset : item.offset + item.length])
        starts = range(0, item.length, item.block)
        digests = [xxhash.xxh3_64_digest(data[start : start + item.block]) for start in starts]
        assert item.digests == b"".join(digests)
        assert all(
            CIPHER.decrypt(memoryview(data)[s : s + item.block], item.nonce_and_macs, n) for n, s in enumerate(starts)
        )
        assert data == raw(tensor)
        nonces.add(item.nonce_and_macs[:24])
    assert len(nonces) == len(tensors)


def test_blocks_fit_into_a_small_buffer() -> None:
    """Encrypted or not, there are at most 64 up to 128 MiB; encrypted they are 2 MiB at most, of tensorizer's grain."""
    for nbytes in (1, 1000, 1 << 20, (5 << 20) + 1, 100_000_001, 128 << 20, 10 << 30):
        step = block_size(nbytes, encrypted=True)
        assert step % 64 == 0
        assert 64 << 10 <= step <= 2 << 20
        assert -(-nbytes // step) <= max(64, -(-nbytes // (2 << 20)))
    assert block_size(5_000_000, encrypted=True) == 78_144
    assert block_size(1 << 40, encrypted=True) == 2 << 20


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("in_order", [False, True])
def test_what_is_encrypted_is_only_read(tmp_path: Path, threads: int, in_order: bool) -> None:
    """Tensors in memory that nobody may write to are encrypted: a write there would end this process."""
    tensor = filled(torch.int32, (1_000_000,))
    (tmp_path / "memory").write_bytes(raw(tensor))
    with open(tmp_path / "memory", "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sink = BufferSink(in_order=in_order)
    layout = lay_out(sources([("t", tensor)]), CIPHER)
    encode(layout, [lambda: memoryview(memory)], sink, threads)
    (entry,) = layout.entries
    assert sink.content[entry.offset : entry.offset + 1000] != raw(tensor)[:1000]
    assert memory[:] == raw(tensor)


def test_the_memory_for_copies_is_bounded() -> None:
    """One block a thread, however large the tensor is."""
    tensor = torch.zeros(64 << 20, dtype=torch.uint8)
    layout = lay_out(sources([("t", tensor)]), CIPHER)
    sink = _Discarding(1 << 20)
    data = host_bytes(tensor)
    tracemalloc.start()
    try:
        encode(layout, [lambda: data], sink, 3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sink.bytes_written == layout.nbytes
    assert peak < 3 * (2 << 20) + (2 << 20)  # parts are mapped, and not counted here


class _Discarding(BufferSink):
    def put_part(self, number: int, data: memoryview) -> None:
        self.bytes_written += data.nbytes


@pytest.mark.parametrize("in_order", [False, True])
def test_an_error_in_one_thread_ends_the_file(in_order: bool) -> None:
    """A cipher that fails in the middle of one tensor that several threads encrypt: the error comes out."""

    class Failing(Cipher):
        def encrypt(self, source: memoryview, target: memoryview, nonce: bytes, number: int) -> bytes:
            if number == 7:
                raise MemoryError("no more")
            return CIPHER.encrypt(source, target, nonce, number)

    sink = BufferSink(4096, in_order=in_order)
    tensor = torch.zeros(2_000_000, dtype=torch.uint8)
    cipher = Failing(KEY)
    with pytest.raises(MemoryError, match="no more"):
        encode(lay_out(sources([("t", tensor)]), cipher), [lambda: host_bytes(tensor)], sink, 3)
    assert (sink.closed, sink.aborted) == (False, True)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path)


@pytest.fixture(params=[True, False], ids=["verify", "trust"])
def verify(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_every_dtype_is_read_in_whole_and_in_parts(storage: Storage, dtype: torch.dtype, verify: bool) -> None:
    """Into contiguous memory and as a region of several blocks, with digests and without."""
    stored = filled(dtype, (301, 703))
    content, items = encrypted({"t": stored}, CIPHER)
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
def test_any_box_is_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, rows: int, columns: int
) -> None:
    """Bit-exact, whatever blocks it takes a part of, in operations of few blocks too."""
    stored = filled(torch.float32, (rows, columns))
    first = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    size = data.draw(st.integers(1, rows - first[0])), data.draw(st.integers(1, columns - first[1]))
    storage = open_storage(tmp_path_factory.mktemp("region"))
    content, items = encrypted({"t": stored}, CIPHER)
    put_file(storage, "f", content, sync=False)
    target = torch.zeros(size)
    nbytes = data.draw(st.sampled_from([1 << 16, 8 << 20]))
    limits = limits_of(storage)._replace(max_scratch_bytes=nbytes, max_coalesced_bytes=nbytes)
    verify = data.draw(st.booleans())
    read(storage, items["t"], stored, target, verify=verify, region=Region(first, size), limits=limits)
    assert same(target, stored[first[0] : first[0] + size[0], first[1] : first[1] + size[1]].contiguous())


@pytest.mark.parametrize("rows", [3, 3000])
def test_tied_weights(storage: Storage, rows: int, verify: bool) -> None:
    """Two names of one memory, encrypted with two nonces: the bytes of one are not taken for the other's."""
    stored = filled(torch.float32, (rows, 1000))
    content, items = encrypted({"embedding": stored, "head": stored}, CIPHER)
    put_file(storage, "f", content)
    target = torch.zeros(rows, 1000)
    shape = (rows, 1000)
    tied = [ReadTarget.of(key, items[key], shape, Region((0, 0), shape), target) for key in ("embedding", "head")]
    fetch(storage, tied, verify=verify, cipher=CIPHER)
    assert same(target, stored)


def test_a_slice_reads_its_blocks_and_no_others(storage: Storage) -> None:
    """A few rows of a tensor of many blocks: not the whole tensor is read, nor decrypted."""
    stored = filled(torch.uint8, (64, 1 << 16))
    content, items = encrypted({"t": stored}, CIPHER)
    put_file(storage, "f", content)
    target = torch.zeros(2, 1 << 16, dtype=torch.uint8)
    region = Region((10, 0), (2, 1 << 16))
    rows = ReadTarget.of("t", items["t"], (64, 1 << 16), region, target)
    assert fetch(storage, [rows], threads=1, verify=False, cipher=CIPHER) == 2 << 16
    assert same(target, stored[10:12])


def test_every_damage_is_found(storage: Storage, tmp_path: Path, verify: bool) -> None:
    """Flipped bits of the ciphertext are a ChecksumMismatch, by their digest or, without digests, by their MAC."""
    stored = filled(torch.uint8, (300_000,))
    content, items = encrypted({"t": stored}, CIPHER)
    item = items["t"]
    for position in (0, 65_535, 65_536, 150_000, 299_999):
        damaged = bytearray(content)
        damaged[item.offset + position] ^= 0x10
        (tmp_path / "f").write_bytes(damaged)
        block = position // item.block * item.block
        with pytest.raises(ChecksumMismatch, match=rf"'t' in .*/f: bytes {block:,} to"):
            read(storage, item, stored, torch.zeros_like(stored), verify=verify)
    (tmp_path / "f").write_bytes(content)
    swapped = item._replace(
        digests=item.digests[::-1], nonce_and_macs=item.nonce_and_macs[:24] + item.nonce_and_macs[24:][::-1]
    )
    with pytest.raises(ChecksumMismatch):
        read(storage, swapped, stored, torch.zeros_like(stored), verify=verify)


def test_a_flip_of_any_byte_of_a_checkpoint(tmp_path: Path) -> None:
    """Of `.metadata` and of every byte that a load reads: an error; of headers, which it does not read: nothing."""
    state = {"w": torch.arange(60.0).view(6, 10), "extra": {"name": "run"}}
    save(tmp_path, state)
    (file,) = tmp_path.glob("*.tensors")
    items = [StoredItem(*i) for i in decode((tmp_path / ".metadata").read_bytes(), "m").storage_data["items"].values()]
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


def test_one_reader_derives_a_key_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deriving costs what the passphrase's guesser is to pay: a reader that loads several checkpoints does it once."""
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
    """What `torch.save` makes of a tensor that has no bytes of its own is not readable either, and comes back."""
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
    """What the checkpoint holds, as plain values, or the error."""
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
    """In parts in any order and in one stream: nothing readable arrives at the server, and it loads resliced."""
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
    """As it stands, with a key file that nobody else can read; what it saved is what it loaded."""
    example = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "encryption.md").read_text(), re.DOTALL)[0]
    check = "\nassert torch.equal(loaded['weight'], state_dict['weight'])\nassert loaded['step'] == 7\n"
    run_python(f"import os\nos.chdir({str(tmp_path)!r})\n{example}{check}")
    assert (tmp_path / "checkpoint.key").stat().st_mode & 0o777 == 0o600
    key = (tmp_path / "checkpoint.key").read_bytes()
    (file,) = (tmp_path / "checkpoint").glob("*.tensors")
    with open_stock(file, DecryptionParams.from_key(key)) as loaded:
        assert same(loaded["weight"].detach(), torch.arange(12.0).view(3, 4))


def test_format_versions_are_pinned() -> None:
    """Plain checkpoints keep the version that older releases read; encrypted ones have one that those refuse."""
    assert (layout_module.FORMAT_VERSION, layout_module.ENCRYPTED_VERSION) == (1, 2)
