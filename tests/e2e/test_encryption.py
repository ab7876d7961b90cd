"""Encrypted checkpoints on real ranks: what is readable in them, who can load them, what encrypting leaves alone."""

import base64
import itertools
import logging
import os
import random
import tempfile

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensorizer import CryptographyError, DecryptionParams, EncryptionParams, TensorDeserializer
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_tensorizer import DecryptionError, TensorizerStorageReader, TensorizerStorageWriter, WriteError
from dcp_tensorizer._tensor_file import encryption as encryption_module

from ..lab.processes import workers
from ..lab.ranks import attempt, eventually, in_turn, run_ranks
from ..lab.states import assert_same
from .training import full, random_tensor

WORLD = 4
PASSPHRASE = "the walrus and the carpenter"
SALT = b"sixteen of salt."
WEAK = {"opslimit": EncryptionParams.OpsLimit.MIN, "memlimit": EncryptionParams.MemLimit.MIN}  # quick
ROADS = ("async_save", "async_save in a process", "async_save to a URL", "save", "async_save without collectives")
RESHARDED = ROADS[:-1]
BIG = 64 << 20  # elements of four bytes: they take a core some 0.2 s to encrypt, in which to be stopped


def _tensors():
    """A tensor whose rows four ranks share unevenly, and others: random bits, known here and on every rank."""
    return {
        "rows": random_tensor(torch.float32, (103, 64), 1),
        "columns": random_tensor(torch.bfloat16, (64, 96), 2),
        "copies": random_tensor(torch.float16, (1000,), 3),
        "eight": random_tensor(torch.float8_e4m3fn, (1000,), 6),
        "scalar": random_tensor(torch.float64, (), 4),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    }


def _objects():
    generator = random.Random(5)
    text = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=3000))
    return {"text": text, "bytes": text[::2].encode(), "list": [text[::-1], 7]}


def _distributed(tensors, mesh, dim):
    placements = {"rows": Shard(dim), "columns": Shard(1 - dim), "copies": Replicate()}
    return {
        name: distribute_tensor(tensor, mesh, [placements[name]]) if name in placements else tensor
        for name, tensor in tensors.items()
    }


def _blank(values):
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in values.items()}


def _params():
    return EncryptionParams.from_string(PASSPHRASE, **WEAK, salt=SALT)


# --- what ranks do ---------------------------------------------------------------------------------------------------


def _save_on_every_road(rank, folder):
    """Saves the same state in all ways, while the log of everything goes to a file; returns what was to be seen."""
    logs = folder / f"log{rank.index}"
    logging.basicConfig(filename=logs, level=logging.DEBUG, force=True)
    mesh = init_device_mesh("cpu", (WORLD,))
    os.environ["TMPDIR"] = str(folder / "temporary")
    tempfile.tempdir = None
    seen = []
    with TensorizerStorageWriter(encryption=_params()) as writer:
        for road in ROADS:
            state = _distributed(_tensors(), mesh, dim=0) | _objects()
            options = {
                "checkpoint_id": _place(folder, road),
                "storage_writer": writer,
                "process_group": rank.saves,
                "use_collectives": "without collectives" not in road,
            }
            if road == "save":
                dcp.save(state, **options)
                continue
            if "in a process" in road:
                options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
            dcp.async_save(state, **options).result()
            seen.append(_what_others_see())
        seen.append(repr(vars(writer)))
    loaded = _distributed(_blank(_tensors()), mesh, dim=0) | dict.fromkeys(_objects())
    reader = TensorizerStorageReader(_place(folder, ROADS[-1]), encryption=DecryptionParams.from_string(PASSPHRASE))
    dcp.load(loaded, storage_reader=reader, process_group=rank.saves)
    return "\n".join(seen), full(loaded)


def _place(folder, road):
    if "URL" in road:
        return f"simplecache::file://{folder}/{road}"
    return folder / road


def _what_others_see():
    """Arguments and environment of this process and all of its children."""
    found = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            found.append(f"{process.cmdline()} {process.environ()}")
        except psutil.Error:
            continue  # it has ended
    return "\n".join(found)


def _load_resharded(rank, folder):
    """Loads with rows as columns, by passphrase and by key, in one reader and the next."""
    mesh = init_device_mesh("cpu", (rank.world_size,))
    keys = itertools.cycle((DecryptionParams.from_string(PASSPHRASE), DecryptionParams.from_key(_params().key)))
    outcomes = {}
    for road, key in zip(RESHARDED, keys, strict=False):
        loaded = _distributed(_blank(_tensors()), mesh, dim=1) | dict.fromkeys(_objects())
        reader = TensorizerStorageReader(_place(folder, road), encryption=key)
        dcp.load(loaded, storage_reader=reader, process_group=rank.saves)
        outcomes[road] = full(loaded)
    return outcomes


def _load_with_wrong_keys(rank, folder, plain):
    """Each way in which key and checkpoint do not go together; returns the failures, and whether targets changed."""
    cases = {
        "no key": (folder / "save", None),
        "another key": (folder / "save", DecryptionParams.from_key(bytes(32))),
        "another passphrase": (folder / "save", DecryptionParams.from_string("the walrus")),
        "a key for a plain one": (plain, DecryptionParams.from_string(PASSPHRASE)),
    }
    failures = {}
    for case, (path, key) in cases.items():
        state = _blank(_tensors()) | {"text": "before"}
        reader = TensorizerStorageReader(path, encryption=key)
        failures[case] = attempt(lambda s=state, r=reader: dcp.load(s, storage_reader=r, process_group=rank.saves))
        assert_same(state, _blank(_tensors()) | {"text": "before"})
    return failures


def _disagree(rank, folder):
    """Saves over a checkpoint by ranks with keys of their own, and one without; then with one key.

    Returns the failures, and for each save whether it has left the files as they were.
    """
    cases = {
        "each its own": EncryptionParams.random(),
        "each its own salt": EncryptionParams.from_string(PASSPHRASE, **WEAK),
        "only the coordinator": EncryptionParams(bytes(32)) if rank.index == 0 else None,
        "all but the coordinator": EncryptionParams(bytes(32)) if rank.index else None,
        "all the same": EncryptionParams(bytes(32)),
    }
    failures, stays, one = {}, {}, EncryptionParams(bytes(32))
    for case, params in cases.items():
        state, names = {f"rank{rank.index}": random_tensor(torch.uint8, (1000,), rank.index)}, []
        for key in (one, params):
            with TensorizerStorageWriter(folder / case, encryption=key) as writer:
                failures[case] = attempt(
                    lambda s=state, w=writer: dcp.save(s, storage_writer=w, process_group=rank.saves)
                )
            dist.barrier()
            names.append(sorted(file.name for file in (folder / case).iterdir()))
            dist.barrier()
        stays[case] = names[0] == names[1]
    return failures, stays


class WatchedWriter(TensorizerStorageWriter):
    """Keeps what it staged."""

    def stage(self, state_dict):
        self.staged = super().stage(state_dict)
        return self.staged


def _stopped_worker(folder, future):
    """The writer process, stopped when it has begun a file."""
    assert eventually(lambda: list(folder.glob("__0_*")) and workers())
    (worker,) = workers()
    worker.suspend()
    assert eventually(lambda: worker.status() == psutil.STATUS_STOPPED)
    assert not future.done()
    return worker


def _encrypt_and_be_killed(rank, folder):
    """Looks at live and staged tensors while the writer process encrypts, kills it, and loads what the next wrote."""
    live = torch.arange(BIG, dtype=torch.int32)
    params = EncryptionParams(bytes(32))
    with WatchedWriter(folder, encryption=params, thread_count=1) as writer:
        future = dcp.async_save({"live": live}, storage_writer=writer, process_group=rank.saves)
        worker = _stopped_worker(folder, future)
        live += 1  # training goes on
        staged = writer.staged["live"]
        unchanged = [torch.equal(staged, torch.arange(BIG, dtype=torch.int32))]
        worker.kill()
        future.result()
        unchanged.append(torch.equal(staged, torch.arange(BIG, dtype=torch.int32)))
        unchanged.append(torch.equal(live, torch.arange(1, BIG + 1, dtype=torch.int32)))
        attempts = writer.last_report.attempts
    live.zero_()
    dcp.load(
        {"live": live},
        storage_reader=TensorizerStorageReader(folder, encryption=DecryptionParams.from_key(params.key)),
        process_group=rank.saves,
    )
    return attempts, unchanged, torch.equal(live, torch.arange(BIG, dtype=torch.int32))


# --- what must be so -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A checkpoint of the same state that is not encrypted."""
    folder = tmp_path_factory.mktemp("plain")
    with TensorizerStorageWriter(folder) as writer:
        dcp.save(_tensors() | _objects(), storage_writer=writer)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder, and by rank what others saw meanwhile and what was loaded without collectives."""
    folder = tmp_path_factory.mktemp("encrypted")
    (folder / "temporary").mkdir()
    return folder, run_ranks(WORLD, _save_on_every_road, folder)


@pytest.fixture(scope="module")
def by_two(saved, plain, tmp_path_factory):
    """What two ranks, started once, loaded, failed to load, and failed to save; and the folder of those saves."""
    folder = tmp_path_factory.mktemp("keys")
    calls = ((_load_resharded, saved[0]), (_load_with_wrong_keys, saved[0], plain), (_disagree, folder))
    return *zip(*run_ranks(2, in_turn, *calls), strict=True), folder


def _windows(content):
    """Every 16 bytes in a row, but for those of zeros, which any tensorizer file has between its parts."""
    return {content[start : start + 16] for start in range(len(content) - 15)} - {bytes(16)}


def _files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_nothing_of_tensors_and_objects_is_readable(saved, plain):
    """No 16 bytes of any tensor or object occur in a row in any file, of whatever road, nor in temporary ones."""
    folder, _ = saved
    secrets = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in _tensors().values()]
    objects = _objects()
    secrets += [objects["text"].encode(), objects["text"][::-1].encode(), objects["bytes"]]
    known = set().union(*map(_windows, secrets))
    assert len(known) > 40_000
    readable = set().union(*(_windows(path.read_bytes()) for path in _files(plain)))
    assert known <= readable, "what is looked for is what a plain checkpoint shows"
    files = _files(folder)
    assert len([path for path in files if path.suffix == ".tensors"]) >= WORLD * len(ROADS)
    assert [str(path) for path in files if not known.isdisjoint(_windows(path.read_bytes()))] == []


def test_names_and_shapes_are_readable(saved):
    """As the documentation says: `.metadata` and the headers of data files are not encrypted."""
    files = [path.read_bytes() for path in _files(saved[0] / "async_save")]
    assert sum(b"columns" in content for content in files) == WORLD + 1


def test_the_key_is_nowhere(saved):
    """Neither key nor passphrase is in a file, a log, arguments, an environment or the writer's own repr."""
    folder, ranks = saved
    key = _params().key
    forms = [key, key.hex().encode(), repr(key)[2:-1].encode(), base64.b64encode(key), PASSPHRASE.encode()]
    files = _files(folder)
    assert len([path for path in files if path.name.startswith("log") and path.stat().st_size]) == WORLD
    assert sum(SALT in path.read_bytes() for path in files) >= len(ROADS), "what is no secret is found"
    assert [str(path) for path in files if any(form in path.read_bytes() for form in forms)] == []
    for seen, _ in ranks:
        assert "dcp_tensorizer._writer_process.worker" in seen
        assert not any(form in seen.encode() for form in forms)


def test_encrypted_checkpoints_load_resharded(by_two):
    """Four ranks' rows are loaded as two ranks' columns, bit-exact, by passphrase and by key, from every road."""
    for outcomes in by_two[0]:
        for road in RESHARDED:
            assert_same(outcomes[road], _tensors() | _objects(), road)


def test_without_collectives(saved):
    """Each rank's own part is encrypted and loaded by the same number of ranks."""
    for _, loaded in saved[1]:
        assert_same(loaded, _tensors() | _objects())


def test_stock_tensorizer_opens_every_file(saved):
    """With the passphrase alone it has every tensor that a rank wrote; with another one it has none."""
    rows = {}
    for path in sorted((saved[0] / "async_save").glob("*.tensors")):
        with TensorDeserializer(path, device="cpu", encryption=DecryptionParams.from_string(PASSPHRASE)) as stock:
            rows[path.name[:3]] = stock["rows"].detach()
        with pytest.raises(CryptographyError):
            TensorDeserializer(path, device="cpu", encryption=DecryptionParams.from_string("another"))
    assert len(rows) == WORLD
    assert_same(torch.cat([rows[name] for name in sorted(rows)]), _tensors()["rows"])


@pytest.mark.promise("key-wrong")
def test_keys_that_do_not_fit(saved, plain, by_two):
    """A missing, wrong or superfluous key is named on every rank, and no target has changed."""
    messages = {
        "no key": "is encrypted. Give its key (encryption=tensorizer.DecryptionParams",
        "another key": "another key or passphrase",
        "another passphrase": "another key or passphrase",
        "a key for a plain one": "is not encrypted, but a key was given",
    }
    for failures in by_two[1]:
        for case, message in messages.items():
            path = plain if "plain" in case else saved[0] / "save"
            assert failures[case].causes.keys() == {0, 1}, case
            for cause in failures[case].causes.values():
                assert type(cause) is DecryptionError
                assert str(path) in str(cause)
                assert message in str(cause)


@pytest.mark.promise("keys-differ")
def test_ranks_must_have_one_key(by_two):
    """Else the save fails on every rank, naming the one that differs, and the old checkpoint stays; one key works."""
    _, _, failed, _ = by_two
    for failures, stays in failed:
        assert failures.pop("all the same").causes == {}
        assert not stays.pop("all the same")
        assert stays == dict.fromkeys(failures, True)
        for failure in failures.values():
            (cause,) = failure.causes.values()
            assert type(cause) is WriteError
            assert "the encryption key of rank 1 differs from the coordinator's" in str(cause)


def test_encrypting_leaves_memory_alone_and_can_be_repeated(tmp_path):
    """While it encrypts and after SIGKILL, live and staged tensors are as they were; the retried save is right."""
    ((attempts, unchanged, right),) = run_ranks(1, _encrypt_and_be_killed, tmp_path)
    assert attempts == 2
    assert unchanged == [True, True, True]
    assert right


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_live_tensors_are_never_changed(tmp_path, monkeypatch, where):
    """Saves without staging encrypt in this process, from live tensors: after each block they are as they were."""
    live = random_tensor(torch.int32, (500_000,), 1)
    expected = live.clone()
    blocks = []
    encrypt = encryption_module.Cipher.encrypt

    def watched(self, source, target, nonce, number):
        mac = encrypt(self, source, target, nonce, number)
        blocks.append(torch.equal(live, expected))
        return mac

    monkeypatch.setattr(encryption_module.Cipher, "encrypt", watched)
    path = tmp_path if where == "disk" else f"memory://{tmp_path}"
    params = EncryptionParams.random()
    with TensorizerStorageWriter(path, encryption=params) as writer:
        dcp.save({"live": live}, storage_writer=writer)
        if where == "memory":
            dcp.async_save({"live": live}, storage_writer=writer).result()
    assert len(blocks) > 30
    assert all(blocks)
    loaded = {"live": torch.zeros_like(live)}
    reader = TensorizerStorageReader(path, encryption=DecryptionParams.from_key(params.key))
    dcp.load(loaded, storage_reader=reader)
    assert_same(loaded["live"], expected)
