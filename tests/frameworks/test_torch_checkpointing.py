"""torch_checkpointing's manager with this package's storage, on real ranks and under its own tests."""

import re
import shutil
import subprocess
import sys
import tarfile

import pytest
import torch
from tensorizer import TensorDeserializer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.resharding import Resharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from dcp_tensorizer import ChecksumMismatch
from dcp_tensorizer.integrations.torch_checkpointing import TensorizerCheckpointManager
from dcp_tensorizer.tools import verify

from ..lab.processes import ROOT, workers
from ..lab.ranks import eventually, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

ITEMS = {
    "model": ItemSpec(resharder=DefaultResharder()),
    "optimizer": ItemSpec(resharder=DefaultResharder(), required=False),
}


def make(**options):
    return TensorizerCheckpointManager.Config(items=ITEMS, **options).build()


def trained(rank):
    """Returns a model and an optimizer after one step, sharded over the ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Linear(50, 7))
    fully_shard(model, mesh=init_device_mesh("cpu", (rank.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(state):
    """Returns all tensors of a state, gathered."""
    tensors = torch.utils._pytree.tree_leaves(state)
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors if isinstance(t, torch.Tensor)]


def payload(model, optimizer, rank):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"], "own": {"rank": rank.index}}


def save(rank, path, options):
    """Saves while the optimizer continues; returns the state to be saved."""
    model, optimizer = trained(rank)
    with_state = payload(model, optimizer, rank)
    expected = [tensor.clone() for tensor in whole(with_state)]
    manager = make(**options)
    manager.prewarm_staging(with_state)
    future = manager.save(path, with_state)
    with manager.lock():
        step(model, optimizer)
    future.result()
    manager.close()
    return expected


def restore(rank, path, options):
    """Loads into a trained model; returns its tensors, and this rank's own items."""
    model, optimizer = trained(rank)
    step(model, optimizer)
    into = payload(model, optimizer, rank)
    into["own"] = {"rank": None} if rank.index < 2 else None
    if into["own"] is None:
        del into["own"]
    manager = make(**options)
    loaded = manager.load(path, into=into, strict=True)
    manager.close()
    own = loaded.pop("own", None)
    assert loaded["model"]["0.weight"] is into["model"]["0.weight"]
    return whole(loaded), own


def test_a_job_goes_on_with_other_numbers_of_ranks(tmp_path):
    """A state saved by two ranks beside an optimizer step is bit for bit the same on one, two and four."""
    path = str(tmp_path / "step-1")
    expected = run_ranks(2, save, path, {})[0]
    assert not verify(path).damages
    assert all(
        TensorDeserializer(str(file), verify_hash=True).keys() for file in (tmp_path / "step-1").glob("*.tensors")
    )
    for ranks in (1, 2, 4):
        for index, (tensors, own) in enumerate(run_ranks(ranks, restore, path, {})):
            assert all(torch.equal(a, b) for a, b in zip(expected, tensors, strict=True))
            assert own == ({"rank": index} if index < 2 else None)


def test_a_local_folder_is_flushed(tmp_path):
    """With `local=`, checkpoints are flushed below the root."""
    options = {"root": str(tmp_path / "remote"), "writer_options": {"local": str(tmp_path / "local")}}
    expected = run_ranks(1, save, str(tmp_path / "remote" / "step-1"), options)[0]
    assert (tmp_path / "remote" / "step-1" / ".metadata").exists()
    tensors, _ = run_ranks(1, restore, str(tmp_path / "remote" / "step-1"), options)[0]
    assert all(torch.equal(a, b) for a, b in zip(expected, tensors, strict=True))


def test_an_object_store(tmp_path, s3):
    """A checkpoint's id may be a URL."""
    keys = {"storage_options": s3.options()}
    options = {"writer_options": keys, "reader_options": keys}
    url = f"s3://{s3.bucket}/torch-checkpointing/step-1"
    expected = run_ranks(2, save, url, options)[0]
    for tensors, _ in run_ranks(2, restore, url, options):
        assert all(torch.equal(a, b) for a, b in zip(expected, tensors, strict=True))
    with pytest.raises(FileNotFoundError, match=r"step-2"):
        _loaded(url.replace("step-1", "step-2"), **options)


def test_damage_is_found(tmp_path):
    """A checkpoint with a flipped bit is refused."""
    path = str(tmp_path / "a")
    _saved(path)
    (file,) = (tmp_path / "a").glob("*.tensors")
    data = bytearray(file.read_bytes())
    data[-2000] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumMismatch):
        _loaded(path)


def _killed(rank, folder):
    """Dies when a second save has written its data and not committed."""
    import os
    import signal

    manager = make()
    state = {"model": {"w": torch.full((1000, 1000), float(rank.index))}, "step": 1}
    manager.save(str(folder / "step-1"), state).result()
    state["model"]["w"].fill_(5.0)
    manager.save(str(folder / "step-2"), state)
    assert eventually(lambda: list((folder / "step-2").glob("*.tensors")))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_that_is_killed_in_a_save(tmp_path):
    """After a kill within a save, the previous checkpoint is complete."""
    run_ranks(1, _killed, tmp_path, killed=(0,))
    assert eventually(lambda: not workers())
    assert _loaded(str(tmp_path / "step-1"))["model"]["w"].unique().tolist() == [0.0]


def _saved(path, **items):
    manager = make(save=CheckpointManager.Config.with_sync_save().save)
    manager.save(path, {"model": {"w": torch.ones(1000, 1000)}, "step": 1, **items})
    manager.close()


def _loaded(path, **options):
    manager = make(**options)
    try:
        return manager.load(path, into={"model": {"w": torch.zeros(1000, 1000)}, "step": 0})
    finally:
        manager.close()


def test_items_without_a_target(tmp_path):
    """Items without a target load as saved, to the given device; a missing item is named."""
    path = str(tmp_path / "a")
    _saved(path, nested={"deep": [torch.ones(2), "text"]})
    manager = make()
    into = {"model": {"w": torch.zeros(1000, 1000)}, "nested": None}
    loaded = manager.load(path, into=into, map_location="cpu")
    assert torch.equal(loaded["nested"]["deep"][0], torch.ones(2))
    assert loaded["nested"]["deep"][1] == "text"
    for missing in (0, None):
        with pytest.raises(FileNotFoundError, match=r"a has no other of rank 0$"):
            manager.load(path, into=into | {"other": missing})
    with pytest.raises(RuntimeError, match=r"Missing key in checkpoint state_dict: model\.v"):
        manager.load(path, into={"model": {"v": torch.zeros(1)}}, strict=True)
    assert manager.load(path, into={"model": {"v": torch.zeros(1)}})["model"]["v"].tolist() == [0.0]
    manager.close()


@pytest.mark.parametrize("has_root", [False, True])
@pytest.mark.parametrize("saved", [ItemSpec(), ItemSpec(resharder=DefaultResharder())], ids=["own", "resharded"])
def test_items_that_were_saved_in_the_other_way(tmp_path, has_root, saved):
    """Items saved with a resharder load without one, and vice versa; empty items load, too."""
    options = {"root": str(tmp_path)} if has_root else {}
    path = str(tmp_path / "step-1")
    for spec in (saved, ItemSpec(resharder=DefaultResharder()), ItemSpec()):
        items = {"model": spec, "empty": spec}
        manager = TensorizerCheckpointManager.Config(items=items, **options).build()
        if spec is saved:
            manager.save(path, {"model": {"w": torch.arange(4.0)}, "empty": {}}).result()
        into = {"model": {"w": torch.zeros(4)}, "empty": {}}
        manager.load(path, into=into)
        manager.close()
        assert torch.equal(into["model"]["w"], torch.arange(4.0))
        assert into["empty"] == {}


def test_what_torch_checkpointing_saved_is_loaded(tmp_path):
    """Checkpoints of torch_checkpointing load."""
    config = CheckpointManager.Config(items=ITEMS, save=CheckpointManager.Config.with_sync_save().save)
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # not every disk takes its direct writes
    theirs = config.build()
    theirs.save(str(tmp_path / "theirs"), {"model": {"w": torch.full((1000, 1000), 3.0)}, "step": 7})
    theirs.close()
    loaded = _loaded(str(tmp_path / "theirs"))
    assert (loaded["model"]["w"].unique().tolist(), loaded["step"]) == ([3.0], 7)


class _Other(Resharder):
    """A resharder of an unsupported class."""

    extract_sharding_metadata = generate_load_plans = reshard = lambda self, *_: {}


def test_what_does_not_exist_here_is_refused(tmp_path):
    """Layouts, other resharders and hooks of torch_checkpointing's process are refused by name."""
    for name in ("pre_finalize_callback", "subprocess_init_fn"):
        with pytest.raises(ValueError, match=rf"^{name} runs in torch_checkpointing's own process"):
            make(**{name: print})
    _Other.__abstractmethods__ = frozenset()
    for spec, message in (
        (ItemSpec(layout=LayoutInfo("x.pt", TorchSerialization())), "item 'x' has a layout"),
        (ItemSpec(resharder=_Other()), "item 'x' must have a DefaultResharder or none, got _Other"),
    ):
        manager = TensorizerCheckpointManager.Config(items={"x": spec}).build()
        with pytest.raises(ValueError, match=message):
            manager.save(str(tmp_path / "a"), {"x": torch.ones(2)})
        manager.close()


def test_the_finalize_callback_is_called_for_a_committed_checkpoint(tmp_path):
    """The finalize callback gets the path of a committed checkpoint on each rank."""
    seen = []

    def finalize(args):
        seen.append((args.path, (tmp_path / "a" / ".metadata").exists()))

    manager = TensorizerCheckpointManager.Config(finalize_callback=finalize).build()
    manager.save(str(tmp_path / "a"), {"step": 1}).result()
    manager.close()
    assert seen == [(str(tmp_path / "a"), True)]


# What its tests ask for beyond the interface: the names of its own files, what is in its own metadata, and calls of the
# functions that make its own saver.
OWN_FILES = {
    "test_sync_save_returns_none_and_writes_checkpoint",
    "test_sync_save_runs_finalize_callback_after_checkpoint_write",
    "test_async_save_prewarms_staging_and_writes_checkpoint",
    "test_load_subset_then_save_all_items_writes_metadata_for_all[sync]",
    "test_load_subset_then_save_all_items_writes_metadata_for_all[async]",
    "test_native_metadata_takes_precedence_over_hf_single_file",
}
OWN_SAVER = {
    "test_async_save_config_forwards_finalize_callback_to_builder",
    "test_prewarm_staging_stages_only_requires_copy_items",
}


def test_its_own_tests_pass_over_it(tmp_path):
    """The tests of its release that use its manager pass, except those of its own files and saver."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    build = ["--no-build-isolation", "torch_checkpointing==0.1.1", "--dest", str(tmp_path)]
    subprocess.run([*download, *build], check=True, timeout=600)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as release:
        release.extractall(tmp_path, filter="data")
    tests = tmp_path / "torch_checkpointing-0.1.1" / "tests"
    files = [str(file) for file in tests.glob("test_*.py") if "CheckpointManager" in file.read_text()]
    shutil.rmtree(tests.parent / "torch_checkpointing")  # the installed one is tested
    options = ["-q", "-rf", "-p", "tests.frameworks.swapped", "-p", "no:cacheprovider", "--rootdir", str(tests)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    failed = set(re.findall(r"^FAILED \S+::(\S+)", done.stdout, re.MULTILINE))
    assert failed == OWN_FILES | OWN_SAVER, done.stdout[-3000:]
    assert re.search(r"8 failed, 48 passed", done.stdout), done.stdout[-300:]
