"""Tests of keys and ciphers against tensorizer's, and that only copies are encrypted."""

from __future__ import annotations

import hashlib
import mmap
import pickle
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, _crypt, _crypt_info

from dcp_tensorizer import DecryptionError
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.encode import encode
from dcp_tensorizer._tensor_file.encryption import Cipher, encryption_cipher, find_other_key, unlock
from dcp_tensorizer._tensor_file.layout import lay_out
from dcp_tensorizer._tensor_file.names import Derivation, Seal, block_size
from dcp_tensorizer._writer_process.protocol import TensorSource

from ...lab.seams import BufferSink, encrypted_file, sources
from ...lab.states import ALL_DTYPES, dtype_name, filled, raw, same

KEY = bytes(range(32))
CIPHER = Cipher(KEY)
WEAK = {"opslimit": EncryptionParams.OpsLimit.MIN, "memlimit": EncryptionParams.MemLimit.MIN}  # quick
NONCES = st.binary(min_size=24, max_size=24)


# --- the cipher ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(data=st.binary(min_size=1, max_size=5000), nonce=NONCES, key=st.binary(min_size=32, max_size=32))
def test_blocks_are_encrypted_as_tensorizer_encrypts_chunks(data: bytes, nonce: bytes, key: bytes) -> None:
    """Bytes, MACs and nonces equal tensorizer's, and each decrypts the other's blocks."""
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
    """Changed data, nonces, MACs, keys or block numbers decrypt nothing, and leave the data unchanged."""
    block = bytearray(1000)
    nonce = Cipher.new_nonce()
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
    """Only the same key opens a check value, and no two values are equal."""
    check = CIPHER.check_value()
    assert CIPHER.opens(check)
    assert not Cipher(KEY[::-1]).opens(check)
    assert CIPHER.check_value() != check
    assert KEY not in check
    assert [CIPHER.opens(check[:length]) for length in range(len(check))] == [False] * len(check)


def test_ranks_with_other_keys_are_found() -> None:
    """The first rank whose key differs, is missing, or is not needed is returned."""
    ours, other = CIPHER.check_value(), Cipher(bytes(32)).check_value()
    assert find_other_key(CIPHER, [(0, ours), (2, CIPHER.check_value())]) is None
    assert find_other_key(CIPHER, [(0, ours), (2, other), (3, b"")]) == 2
    assert find_other_key(CIPHER, [(0, ours), (3, b"")]) == 3
    assert find_other_key(None, [(0, b""), (1, b"")]) is None
    assert find_other_key(None, [(0, b""), (1, ours)]) == 1


def test_a_key_is_in_no_repr() -> None:
    """No repr shows the key, and a pickled copy has it."""
    cipher = encryption_cipher(EncryptionParams.from_string("passphrase", **WEAK))
    assert repr(cipher.key) not in repr(cipher)
    assert cipher.key.hex() not in repr(cipher)
    assert "Derivation" in repr(cipher)
    assert pickle.loads(pickle.dumps(cipher)) == cipher


# --- tensorizer's parameters -----------------------------------------------------------------------------------------


def record_of(cipher: Cipher, fingerprint: bytes = b"f" * 32) -> dict[str, Any]:
    """Returns the description of a key as a reader of an index has it."""
    seal = Seal(fingerprint, cipher.sign(fingerprint))
    return {"derivation": cipher.derivation, "check": cipher.check_value(), "seal": seal}


def test_an_index_that_was_made_without_the_key() -> None:
    """Another fingerprint, or another key's signature, raises `DecryptionError`, also for a known key."""
    unsigned = record_of(CIPHER) | {"seal": Seal(b"g" * 32, CIPHER.sign(b"f" * 32))}
    foreign = record_of(CIPHER) | {"seal": Seal(b"f" * 32, Cipher(bytes(32)).sign(b"f" * 32))}
    for record in (unsigned, foreign):
        with pytest.raises(DecryptionError, match="/c: its metadata was changed without its key"):
            unlock(DecryptionParams.from_key(KEY), record, "/c")
        with pytest.raises(DecryptionError, match="changed"):
            unlock(None, record, "/c", known=CIPHER)
    assert unlock(None, record_of(CIPHER), "/c", known=CIPHER) is CIPHER
    assert CIPHER.sign(b"f" * 32) != CIPHER.sign(b"g" * 32)


def test_keys_of_all_kinds(tmp_path: Path) -> None:
    """Random keys, keys from bytes and files, and derived keys are equal in writers and readers."""
    random = EncryptionParams.random()
    assert encryption_cipher(random) == Cipher(random.key)
    assert unlock(DecryptionParams.from_key(random.key), record_of(Cipher(random.key)), "/c") == Cipher(random.key)
    (tmp_path / "key").write_bytes(random.key)
    assert encryption_cipher(EncryptionParams((tmp_path / "key").read_bytes())) == Cipher(random.key)
    made = EncryptionParams.from_string("correct horse", **WEAK, salt=b"sixteen of salt.")
    cipher = encryption_cipher(made)
    assert cipher == Cipher(made.key, Derivation(1, 8192, 2, b"sixteen of salt."))
    assert [type(value) for value in cipher.derivation or ()] == [int, int, int, bytes]
    assert unlock(DecryptionParams.from_string("correct horse"), record_of(cipher), "/c") == cipher
    assert unlock(DecryptionParams.from_key(made.key), record_of(cipher), "/c") == Cipher(made.key)
    with pytest.raises(DecryptionError, match="/c was encrypted with another key"):
        unlock(DecryptionParams.from_string("other horse"), record_of(cipher), "/c")


def test_a_passphrase_for_what_was_encrypted_with_a_key() -> None:
    """The error names the constructor of tensorizer to use."""
    with pytest.raises(DecryptionError, match="from_key"):
        unlock(DecryptionParams.from_string("passphrase"), record_of(Cipher(KEY)), "/c")


def test_a_derivation_that_cannot_be_carried_out() -> None:
    """The error names the memory that the derivation needs, and not the passphrase."""
    record = record_of(Cipher(KEY, Derivation(1, 1_000, 2, bytes(16))))
    with pytest.raises(DecryptionError, match=r"1,000 bytes") as caught:
        unlock(DecryptionParams.from_string("passphrase"), record, "/c")
    assert "passphrase'" not in str(caught.value)


@pytest.mark.parametrize(("operations", "memory"), [(5, 8192), (1, (1 << 30) + 1), (10**9, 1 << 40)])
def test_a_derivation_that_costs_too_much(operations: int, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reader and writer refuse more than libsodium's preset "sensitive"; the reader derives nothing.

    The error names the costs, which may be forged, and how to load the checkpoint if they are not.
    """
    monkeypatch.setattr(EncryptionParams, "from_string", lambda *a, **k: pytest.fail("a key was derived"))
    cipher = Cipher(KEY, Derivation(operations, memory, 2, b"sixteen of salt."))
    costs = f"an opslimit of {operations:,} and a memlimit of {memory:,}"
    call = f"opslimit={operations}, memlimit={memory}, salt=bytes.fromhex('{b'sixteen of salt.'.hex()}')"
    with pytest.raises(DecryptionError, match=re.escape(costs)) as caught:
        unlock(DecryptionParams.from_string("passphrase"), record_of(cipher), "/c")
    assert call in str(caught.value)
    assert unlock(DecryptionParams.from_key(KEY), record_of(cipher), "/c") == Cipher(KEY)
    params = EncryptionParams(KEY)
    made = _crypt_info.PWHashKeyDerivationChunk(operations, memory, 2, b"sixteen of salt.")
    monkeypatch.setattr(EncryptionParams, "_crypt_info_chunk", lambda self: made)
    with pytest.raises(ValueError, match=f"at most 4 .* of at most 1,073,741,824, got {operations:,} and {memory:,}"):
        encryption_cipher(params)


def test_the_costliest_preset_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer takes a key that was derived with libsodium's preset "sensitive"."""
    costs = Derivation(EncryptionParams.OpsLimit.SENSITIVE, EncryptionParams.MemLimit.SENSITIVE, 2, bytes(16))
    params = EncryptionParams(KEY)
    monkeypatch.setattr(
        EncryptionParams, "_crypt_info_chunk", lambda self: _crypt_info.PWHashKeyDerivationChunk(*costs)
    )
    assert encryption_cipher(params) == Cipher(KEY, costs)


# --- files -----------------------------------------------------------------------------------------------------------


def open_stock(path: Path, decryption: Any = None) -> TensorDeserializer:
    decryption = decryption or DecryptionParams.from_key(KEY)
    return TensorDeserializer(path, device="cpu", encryption=decryption, verify_hash=True)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=dtype_name)
def test_stock_tensorizer_decrypts_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """tensorizer decrypts 0-dim tensors, single elements, and several blocks with a shorter last one."""
    many = filled(dtype, (200_001,))
    tensors = {
        "scalar": filled(dtype, ()),
        "one": filled(dtype, (1,)),
        "region": filled(dtype, (3, 4, 5)),
        "many": many,
    }
    (tmp_path / "f").write_bytes(encrypted_file(tensors, CIPHER)[0])
    with open_stock(tmp_path / "f") as loaded:
        assert list(loaded.keys()) == list(tensors)
        assert [name for name, tensor in tensors.items() if not same(loaded[name], tensor)] == []


def test_stock_tensorizer_derives_the_key_from_a_passphrase(tmp_path: Path) -> None:
    """Each header has the costs and the salt."""
    cipher = encryption_cipher(EncryptionParams.from_string("correct horse", **WEAK))
    tensors = {"a": filled(torch.float32, (70_000,)), "b": filled(torch.bfloat16, (7,))}
    (tmp_path / "f").write_bytes(encrypted_file(tensors, cipher)[0])
    with open_stock(tmp_path / "f", DecryptionParams.from_string("correct horse")) as loaded:
        assert all(same(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("derivation", [None, Derivation(1, 8192, 2, b"sixteen of salt.")], ids=["key", "passphrase"])
@pytest.mark.parametrize("shape", [(3,), (300_000,)])
def test_headers_say_what_tensorizers_own_say(derivation: Derivation | None, shape: tuple[int, ...]) -> None:
    """tensorizer's code makes equal bytes from the same values, and no hash of the plain data is stored."""
    tensor = filled(torch.float32, shape)
    content, items = encrypted_file({"t": tensor}, Cipher(KEY, derivation))
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
    """Version and flags equal those of tensorizer's encrypted files, for all dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {"t": filled(dtype, (10,))}
        serializer = TensorSerializer(tmp_path / "stock", encryption=EncryptionParams(KEY))
        serializer.write_state_dict({name: tensor.clone() for name, tensor in tensors.items()})
        serializer.close()
        theirs = (tmp_path / "stock").read_bytes()
        assert encrypted_file(tensors, CIPHER)[0][:41] == theirs[:41]
    huge = TensorSource("t", "uint8", (1 << 33,), 1 << 33)
    assert lay_out([huge], CIPHER).head[5:10] == b"\5\0\0\0\3"  # version; encrypted, and a versioned index


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 300_000), max_size=6),
    threads=st.integers(1, 5),
    part_bytes=st.sampled_from([4096, 1 << 16, 1 << 20]),
    in_order=st.booleans(),
)
def test_any_number_of_threads_and_parts(lengths: list[int], threads: int, part_bytes: int, in_order: bool) -> None:
    """Each block decrypts, its digest is of the stored bytes, and no two have the same nonce."""
    tensors = {f"{n}": filled(torch.uint8, (length,), n) for n, length in enumerate(lengths)}
    content, items = encrypted_file(tensors, CIPHER, threads, part_bytes, in_order=in_order)
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
    """Items up to 128 MiB have at most 64 blocks; encrypted blocks have at most 2 MiB."""
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
    """Tensors in read-only memory are encrypted; a write would kill this process."""
    tensor = filled(torch.int32, (1_000_000,))
    (tmp_path / "memory").write_bytes(raw(tensor))
    with open(tmp_path / "memory", "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sink = BufferSink(in_order=in_order)
    layout = lay_out(sources([("t", tensor)]), CIPHER)
    encode(layout, lambda _: memoryview(memory), sink, threads)
    (entry,) = layout.entries
    assert sink.content[entry.offset : entry.offset + 1000] != raw(tensor)[:1000]
    assert memory[:] == raw(tensor)


def test_the_memory_for_copies_is_bounded() -> None:
    """Each thread has memory for one block, whatever the tensor's size."""
    tensor = torch.zeros(64 << 20, dtype=torch.uint8)
    layout = lay_out(sources([("t", tensor)]), CIPHER)
    sink = _Discarding(1 << 20)
    data = host_bytes(tensor)
    tracemalloc.start()
    try:
        encode(layout, lambda _: data, sink, 3)
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
    """The error of a cipher is raised, also if several threads encrypt one tensor."""

    class Failing(Cipher):
        def encrypt(self, source: memoryview, target: memoryview, nonce: bytes, number: int) -> bytes:
            if number == 7:
                raise MemoryError("no more")
            return CIPHER.encrypt(source, target, nonce, number)

    sink = BufferSink(4096, in_order=in_order)
    tensor = torch.zeros(2_000_000, dtype=torch.uint8)
    cipher = Failing(KEY)
    with pytest.raises(MemoryError, match="no more"):
        encode(lay_out(sources([("t", tensor)]), cipher), lambda _: host_bytes(tensor), sink, 3)
    assert (sink.closed, sink.aborted) == (False, True)
