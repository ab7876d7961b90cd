"""Checkpoints that earlier releases wrote: each loads bit for bit, and no damage to one goes unnoticed.

`tests/corpus/write.py` wrote them, each release's once. A change of the format that these tests refuse breaks
checkpoints that people have.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensorizer import DecryptionParams

from dcp_tensorizer import CheckpointError, CheckpointManager, TensorizerStorageReader, apply_delta, open_reader, unwrap
from dcp_tensorizer.tools import list_versions, verify_versions

from ..corpus.contents import CHECKPOINTS, KEY, MODELS, digest, digests_of
from ..lab.ranks import run_ranks

CORPUS = Path(__file__).parents[1] / "corpus"
RELEASES = [path.name for path in sorted(CORPUS.glob("[0-9]*"))]
KINDS = [(release, name) for release in RELEASES for name in (*CHECKPOINTS, *MODELS) if name != "per-rank"]


def expected(release, name):
    return json.loads((CORPUS / release / "digests.json").read_text())[name]


def reader_of(folder, name):
    if name in MODELS:
        return open_reader(folder)
    return TensorizerStorageReader(folder, encryption=DecryptionParams.from_key(KEY) if name == "encrypted" else None)


def load(folder, name):
    """The digests of all that a checkpoint holds; None if the load is refused."""
    try:
        return digests_of(reader_of(folder, name))
    except (CheckpointError, dcp.api.CheckpointException) as error:
        if not isinstance(unwrap(error), CheckpointError):
            raise
    return None


def test_a_release_has_a_corpus():
    """The corpus is there, so that the tests below cannot be of nothing."""
    assert "0.1" in RELEASES


@pytest.mark.parametrize(("release", "name"), KINDS)
def test_a_checkpoint_of_an_earlier_release_loads(release, name):
    """Every tensor and object of every kind of checkpoint is what it was when its release loaded it."""
    assert load(CORPUS / release / name, name) == expected(release, name)


@pytest.mark.parametrize(("release", "name"), KINDS)
def test_a_flipped_byte_is_noticed(release, name, tmp_path):
    """With one byte flipped a load fails or gives the same, and some bytes of each file make it fail.

    Of models only the index is changed, and only the class of the error is compared: safetensors has no digests.
    """
    path = tmp_path / "copy"
    shutil.copytree(CORPUS / release / name, path)
    files = sorted(path.glob(".metadata" if name not in MODELS else "*.json")) + sorted(path.glob("*.tensors"))
    right, refused = expected(release, name), set()
    for file in files:
        data = file.read_bytes()
        used = [position for position, byte in enumerate(data) if byte]  # most of a file's header is zeros
        for position in used[:: len(used) // 12]:
            file.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
            found = load(path, name)
            if found is None:
                refused.add(file.name)
            else:
                assert name in MODELS or found == right, f"{file.name} at {position}"
        file.write_bytes(data)
    assert name in MODELS or refused == {file.name for file in files}


@pytest.mark.parametrize("release", RELEASES)
def test_each_rank_loads_what_it_saved_for_itself(release):
    """Without collectives each rank saved an index of its own, and loads by it."""
    assert run_ranks(2, _own, CORPUS / release / "per-rank") == list(expected(release, "per-rank").values())


def _own(rank, folder):
    state = {"w": torch.zeros(6)}
    dcp.load(state, storage_reader=TensorizerStorageReader(folder))
    return digest(state["w"])


@pytest.mark.parametrize("release", RELEASES)
def test_a_managers_folder_is_resumed(release, tmp_path):
    """A job resumes from the branch that it took when it went back, and the metrics still choose the best step."""
    folder = tmp_path / "run"
    shutil.copytree(CORPUS / release / "manager", folder)
    state = {"w": torch.zeros(40, 30), "step": 0}
    with CheckpointManager(folder, keep_best="loss", keep_latest=10, stop_signals=()) as manager:
        assert manager.restore(state) == 4
        assert {key: digest(value) for key, value in state.items()} == expected(release, "manager/step-4")
        assert (manager.steps(), manager.best()) == ([1, 2, 4], 4)


@pytest.mark.parametrize("release", RELEASES)
def test_published_versions_are_applied(release, tmp_path):
    """Each version, whole or a delta, gives the weights that were published, and a copy follows to the next ones."""
    source = tmp_path / "versions"
    shutil.copytree(CORPUS / release / "versions", source)
    assert not verify_versions(source).damages
    assert [info.is_delta for info in list_versions(source)] == [True, True, False]
    for number, right in expected(release, "versions").items():
        apply_delta(tmp_path / "copy", source, version=int(number))
        state = {"w": torch.zeros(3000)}
        dcp.load(state, storage_reader=open_reader(tmp_path / "copy"), no_dist=True)
        assert digest(state["w"]) == right
