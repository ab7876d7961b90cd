"""Tests of models in Hugging Face's layout, written by several ranks together."""

import itertools
import json
import uuid
import warnings
from contextlib import suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_tensorizer import (
    CheckpointManager,
    Export,
    Parts,
    Publish,
    SafetensorsStorageWriter,
    SavePlanner,
    TensorizerStorageReader,
    WriteError,
    open_reader,
)
from dcp_tensorizer._models import pieces as model_pieces
from dcp_tensorizer._storage.local import LocalStorage
from dcp_tensorizer._storage.s3 import S3Storage
from dcp_tensorizer.tools import list_versions

from ..lab.ranks import attempt, kill_self, run_ranks


def make_state(ranks):
    """Returns a sharded state and the whole one: rows, columns, a grid, few rows, replicas, and models under FSDP2.

    One of the models also uses tensor parallelism.
    """
    mesh, grid = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (2, ranks // 2))
    torch.manual_seed(0)
    full = {f"rows.{n}": torch.randn(77, 257) for n in range(3)}
    full |= {f"columns.{n}": torch.randn(64, 130).to(torch.bfloat16) for n in range(3)}
    full |= {"grid": torch.randn(50, 70), "few": torch.randn(3), "n": torch.tensor(7), "none": torch.empty(0, 4)}
    full["plain"] = torch.arange(5000)
    layout = {"rows": (mesh, [Shard(0)]), "columns": (mesh, [Shard(1)]), "grid": (grid, [Shard(0), Shard(1)])}
    layout |= {"few": (mesh, [Shard(0)]), "none": (mesh, [Shard(0)]), "n": (mesh, [Replicate()])}
    state = {}
    for key, tensor in full.items():
        where = layout.get(key.split(".")[0])
        state[key] = tensor if where is None else distribute_tensor(tensor, *where)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 33))
    full |= {f"model.{key}": tensor.clone() for key, tensor in model.state_dict().items()}
    fully_shard(model, mesh=mesh)
    state |= {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    both = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("data", "tensor"))
    model = torch.nn.Sequential(torch.nn.Linear(30, 26), torch.nn.Linear(26, 30))
    full |= {f"both.{key}": tensor.clone() for key, tensor in model.state_dict().items()}
    parallelize_module(model, both["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=both["data"])
    state |= {f"both.{key}": tensor for key, tensor in model.state_dict().items()}
    return state | {"tied": state["rows.0"]}, full


def save_all(rank, folder):
    """Saves in each way: as on one machine's disk, as on a shared mount, with and without staging, and cast."""
    warnings.simplefilter("ignore")
    state, full = make_state(rank.world_size)
    with SafetensorsStorageWriter(max_shard_bytes=150_000) as writer:

        def save_to(name, save=dcp.async_save, **options):
            done = save(state, storage_writer=writer, checkpoint_id=folder / name, process_group=rank.saves, **options)
            return done.result() if save is dcp.async_save else done

        save_to("disk")
        LocalStorage.granule_of = lambda self, nbytes: 4096
        model_pieces._WINDOW = 20_000  # more than one exchange
        save_to("mount", planner=SavePlanner())
        save_to("sync", dcp.save)
    with SafetensorsStorageWriter(folder / "cast", dtype=torch.float16) as writer:
        dcp.async_save(state, storage_writer=writer, process_group=rank.saves).result()
    return full, save_in_parts(rank, folder)


RENAME = {
    "*.w13": Parts("hf.*.{}.gate", "hf.*.{}.up", dim=1),
    "*.w2": Parts("hf.*.{}.down"),
    "*.qkv": Parts("hf.*.q", "hf.*.k", "hf.*.v", sizes=(4, 1, 1)),
    "*.fused": Parts("hf.*.queries", "hf.*.key", "hf.*.value", sizes=(4, 1, 1), groups=5),
    Parts("*.in.{}.w"): "hf.*.stacked",
    Parts("*.a", "*.b", dim=1): "hf.*.ab",
    "embed": "hf.tokens",
}


def save_in_parts(rank, folder):
    """Saves tensors in parts and joined, as on a disk and on a mount; loads them with other shardings."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (rank.world_size,))
    shapes = {"0.w13": (5, 34, 40), "1.w13": (5, 34, 40), "0.w2": (5, 40, 17), "0.qkv": (66, 40), "embed": (50, 40)}
    shapes["0.fused"] = (5 * (4 + 1 + 1) * 3, 40)  # groups x (queries, a key and a value) x rows of a head
    shapes |= {f"0.in.{n}.w": (31, 20) for n in range(3)} | {"0.a": (33, 20), "0.b": (33, 20)}
    full = {key: torch.randn(shape) for key, shape in shapes.items()}
    dims = {"1.w13": 2, "0.w2": 1, "0.b": 1}
    state = {key: distribute_tensor(tensor, mesh, [Shard(dims.get(key, 0))]) for key, tensor in full.items()}
    with SafetensorsStorageWriter(max_shard_bytes=30_000, rename=RENAME, dtype=torch.bfloat16) as writer:
        for name, granule in ("parts", 1), ("parts-mount", 4096):
            LocalStorage.granule_of = lambda self, nbytes, granule=granule: granule
            dcp.async_save(state, storage_writer=writer, checkpoint_id=folder / name, process_group=rank.saves).result()
    found = {key: distribute_tensor(torch.zeros(shape), mesh, [Shard(1)]) for key, shape in shapes.items()}
    dcp.load(found, storage_reader=open_reader(folder / "parts-mount", rename=RENAME), process_group=rank.saves)
    same = {key: torch.equal(found[key].full_tensor(), tensor.bfloat16().float()) for key, tensor in full.items()}
    assert same == dict.fromkeys(full, True)
    return {key: tensor.bfloat16() for key, tensor in full.items()}


def in_files(saved):
    """Returns the expected contents of the files for tensors saved in parts and joined."""
    full = {f"hf.0.{n}.down": part for n, part in enumerate(saved["0.w2"])}
    for layer, n in itertools.product(range(2), range(5)):
        halves = saved[f"{layer}.w13"][n].chunk(2, dim=1)
        full |= {f"hf.{layer}.{n}.{name}": half.contiguous() for name, half in zip(("gate", "up"), halves, strict=True)}
    full |= zip((f"hf.0.{name}" for name in "qkv"), saved["0.qkv"].split([44, 11, 11]), strict=True)
    of_groups = saved["0.fused"].view(5, 6 * 3, 40).split([4 * 3, 3, 3], dim=1)  # as Megatron converts its own
    parts = zip(("queries", "key", "value"), of_groups, strict=True)
    full |= {f"hf.0.{name}": part.reshape(-1, 40) for name, part in parts}
    full["hf.0.stacked"] = torch.stack([saved[f"0.in.{n}.w"] for n in range(3)])
    return full | {"hf.0.ab": torch.cat([saved["0.a"], saved["0.b"]], dim=1), "hf.tokens": saved["embed"]}


def assert_holds(path, full, scratch):
    """The files have the library's bytes for the whole tensors."""
    files = sorted(path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    found = {}
    for file in files:
        keys = list(load_file(file))
        found |= dict.fromkeys(keys, file.name)
        save_file({key: full[key] for key in keys}, scratch, metadata={"format": "pt"})
        assert file.read_bytes() == scratch.read_bytes(), file
    assert set(found) == set(full)
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == found
    assert sorted(path.iterdir()) == sorted([*files, *([index] if index.exists() else [])])


def test_ranks_write_their_parts_in_place(tmp_path):
    """The files have the bytes that one process would have written from the gathered state.

    This also holds for experts and projections that are saved in parts or joined, and a load reverses that.
    """
    full, saved = run_ranks(4, save_all, tmp_path)[0]
    for name in ("disk", "mount", "sync"):
        assert_holds(tmp_path / name, full, tmp_path / "scratch")
    half = {key: tensor.to(torch.float16) if tensor.is_floating_point() else tensor for key, tensor in full.items()}
    assert_holds(tmp_path / "cast", half, tmp_path / "scratch")
    for name in ("parts", "parts-mount"):
        assert_holds(tmp_path / name, in_files(saved), tmp_path / "scratch")


def tie(rank, folder):
    """Saves whole tensors that are tied on no rank, on one rank, on all, and on all in another order."""
    warnings.simplefilter("ignore")
    failures = {}
    for name, tied in {"none": [], "0": [0], "1": [1], "both": [0, 1], "turned": [0, 1]}.items():
        first = torch.arange(5000.0)
        state = {"a": first, "b": first if rank.index in tied else first.clone(), "c": torch.ones(rank.index + 1)[:1]}
        if name == "turned" and rank.index:
            state = {key: state[key] for key in ("b", "a", "c")}
        for save in dcp.save, lambda *args, **options: dcp.async_save(*args, **options).result():
            with SafetensorsStorageWriter(folder / name, overwrite=True) as writer:

                def run(save=save, writer=writer, state=state):
                    save(state, storage_writer=writer, process_group=rank.saves)

                failures.setdefault(name, []).append(attempt(run))
    return failures


def test_whole_tensors_are_tied_on_all_ranks_or_on_none(tmp_path):
    """A tensor that is tied on some ranks only is an error, whichever rank would write it."""
    for failures in run_ranks(2, tie, tmp_path):
        for name, untied in ("0", 1), ("1", 0):
            for failure in failures.pop(name):
                (error,) = failure.causes.values()
                assert f"'b' is tied to another tensor on some rank, but not on rank {untied}. Tie" in str(error)
            assert not list((tmp_path / name).glob("*.safetensors"))
        assert {name: [failure.causes for failure in both] for name, both in failures.items()} == {
            "none": [{}, {}],
            "both": [{}, {}],
            "turned": [{}, {}],
        }
    keys = {name: set(load_file(tmp_path / name / "model.safetensors")) for name in ("none", "both", "turned")}
    assert keys == {"none": {"a", "b", "c"}, "both": {"a", "c"}, "turned": {"a", "c"}}


def fail_on_one(rank, folder):
    """One rank cannot write: before the exchange, and during it; then a save succeeds."""
    warnings.simplefilter("ignore")
    state, _ = make_state(2)
    failures = []
    writer = SafetensorsStorageWriter(overwrite=True, max_shard_bytes=150_000)
    with writer:
        dcp.save(state, storage_writer=writer, checkpoint_id=folder, process_group=rank.saves)
        names = sorted(file.name for file in folder.iterdir())
        LocalStorage.granule_of = lambda self, nbytes: 4096

        def save():
            dcp.save(state, storage_writer=writer, checkpoint_id=folder, process_group=rank.saves)

        def fail(*arguments, **options):
            raise WriteError("out of order")

        for owner, name in (LocalStorage, "open_shared"), (model_pieces, "host_bytes"):
            original = getattr(owner, name)
            if rank.index == 1:
                setattr(owner, name, fail)
            failures.append(attempt(save))
            setattr(owner, name, original)
            assert sorted(file.name for file in folder.iterdir()) == names
        save()
    return failures


@pytest.mark.promise("model-save-fails", reason="the error on every rank")
def test_a_rank_that_fails_keeps_nobody_waiting(tmp_path):
    """All ranks raise the cause within seconds, the old model stays, and no new file is left."""
    for failures in run_ranks(2, fail_on_one, tmp_path / "model"):
        for failure in failures:
            assert [(rank, str(error)) for rank, error in failure.causes.items()] == [(1, "rank 1: out of order")]
            assert failure.seconds < 30
    assert_is_whole(tmp_path / "model")


def interrupt_one(rank, folder):
    """One rank is interrupted before it has written anything; then a save succeeds."""
    warnings.simplefilter("ignore")
    state, _ = make_state(2)
    LocalStorage.granule_of = lambda self, nbytes: 4096
    seen = []

    def on_progress(done, total):
        seen.append(done)
        if rank.index == 1 and len(seen) == 1:
            raise KeyboardInterrupt("Ctrl-C")

    with SafetensorsStorageWriter(folder, max_shard_bytes=150_000, on_progress=on_progress) as writer:

        def save():
            dcp.save(state, storage_writer=writer, process_group=rank.saves)

        failure = attempt(save)
        save()
    return failure


def test_a_rank_that_is_interrupted_keeps_nobody_waiting(tmp_path):
    """All ranks raise the cause within seconds, even if the user's on_progress raises it."""
    for failure in run_ranks(2, interrupt_one, tmp_path / "model"):
        assert [(rank, repr(error)) for rank, error in failure.causes.items()] == [(1, "KeyboardInterrupt('Ctrl-C')")]
        assert failure.seconds < 30
    assert_is_whole(tmp_path / "model")


def assert_is_whole(path):
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index.values()) == {file.name for file in path.glob("*.safetensors")}
    for name in set(index.values()):
        assert {key for key, file in index.items() if file == name} == set(load_file(path / name))


def die(rank, folder, victim):
    """A rank is killed while it writes its part."""
    warnings.simplefilter("ignore")
    state, _ = make_state(2)
    config = folder.parent / "config.json"
    config.write_text("old")
    options = {"overwrite": True, "max_shard_bytes": 150_000, "files": [config]}
    with SafetensorsStorageWriter(folder, **options) as writer:
        dcp.save(state, storage_writer=writer, process_group=rank.saves)
        config.write_text("new")
        if rank.index == victim:
            LocalStorage.open_shared = lambda *arguments, **options: kill_self()
        return attempt(lambda: dcp.save(state, storage_writer=writer, process_group=rank.saves))


@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "other"])
def test_a_rank_that_is_killed_leaves_the_old_model(tmp_path, victim):
    """The next save removes the leftovers of a killed one."""
    run_ranks(2, die, tmp_path / "model", victim, killed=[victim])
    left = sorted(file.name for file in (tmp_path / "model").iterdir())
    assert any(name.endswith(".tmp") for name in left) == (victim == 0)
    assert any(name.startswith("config.json.") for name in left) == (victim == 0)
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    assert all((tmp_path / "model" / name).exists() for name in index.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with SafetensorsStorageWriter(tmp_path / "model", overwrite=True) as writer:
            dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True)
    assert_is_whole(tmp_path / "model")
    assert len(list((tmp_path / "model").iterdir())) == 3


def save_to_s3(rank, url, options):
    """Saves files of several parts each, some of them shared by ranks; then one rank cannot send its part."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    full = {f"w{n}": torch.randn(1000 + n, 3001) for n in range(3)} | {"c": torch.randn(2000, 999)}
    for tensor in full.values():
        torch.distributed.broadcast(tensor, 0)
    state = {key: distribute_tensor(t, mesh, [Shard(1 if key == "c" else 0)]) for key, t in full.items()}
    with SafetensorsStorageWriter(url, storage_options=options, max_shard_bytes=30_000_000, overwrite=True) as writer:
        dcp.async_save(state, storage_writer=writer, process_group=rank.saves).result()

        def fail(*arguments, **options):
            raise WriteError("out of order")

        if rank.index == 1:
            S3Storage.open_shared = fail
        failure = attempt(lambda: dcp.save(state, storage_writer=writer, process_group=rank.saves))
    return full, failure


def test_ranks_share_one_upload_for_each_file(s3, tmp_path):
    """The objects have the library's bytes for the whole tensors; a failed save leaves no upload."""
    prefix = uuid.uuid4().hex
    results = run_ranks(3, save_to_s3, f"s3://{s3.bucket}/{prefix}", s3.options())
    full = results[0][0]
    for name in s3.objects(prefix):
        content = s3.client().get_object(Bucket=s3.bucket, Key=f"{prefix}/{name}")["Body"].read()
        (tmp_path / name).write_bytes(content)
    assert_holds(tmp_path, full, tmp_path.parent / "scratch")
    assert len(list(tmp_path.iterdir())) == 3
    assert [list(failure.causes) for _, failure in results] == [[1]] * 3
    assert s3.uploads(prefix) == []


def export_steps(rank, folder):
    """Trains under FSDP2, saves every second step, and exports every fourth and the last one."""
    warnings.simplefilter("ignore")
    torch.manual_seed(rank.index)
    model = torch.nn.Sequential(torch.nn.Linear(50, 61), torch.nn.Linear(61, 50))
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    fully_shard(model, mesh=init_device_mesh("cpu", (rank.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "shared": torch.ones(5)}
    wanted = {}
    keys = {"include": ["model.*", "shared"], "rename": {"shared": "extra.shared", "model.*": "*"}}
    export = Export(folder / "models" / "{}", every=4, dtype=torch.bfloat16, **keys)
    with CheckpointManager(folder / "run", save_every=2, export=export) as manager:
        for step in range(1, 8):
            model(torch.rand(4, 50)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step, state)
            whole = {key: tensor.full_tensor().detach() for key, tensor in model.state_dict().items()}
            wanted[step] = {key: tensor.to(torch.bfloat16) for key, tensor in whole.items()}
    words = r"step 4 was saved, but not exported: .*holds a model already"
    again = CheckpointManager(folder / "again", export=Export(folder / "models" / "4"))
    again.save(4, state, wait=True)
    with pytest.raises(WriteError, match=words):
        again.close()
    with suppress(KeyError), CheckpointManager(folder / "broken", export=Export(folder / "none")) as manager:
        manager.save(1, state)
        raise KeyError
    return wanted


def test_a_manager_exports_what_it_saves(tmp_path):
    """Each export is the cast model of its step, and checkpoints are not changed; a failed job exports nothing more."""
    wanted = run_ranks(2, export_steps, tmp_path)[0]
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["4", "6"]
    for step in (4, 6):
        found = load_file(tmp_path / "models" / str(step) / "model.safetensors")
        assert found.pop("extra.shared").tolist() == [1.0] * 5
        assert {key: torch.equal(found[key], tensor) for key, tensor in wanted[step].items()} == dict.fromkeys(
            found, True
        )
    state = {"shared": torch.zeros(5)}
    dcp.load(state, storage_reader=TensorizerStorageReader(tmp_path / "run" / "step-6"), no_dist=True)
    assert state["shared"].tolist() == [1.0] * 5
    assert not (tmp_path / "none").exists()


class StateOf:
    """A member of a state that fails to return it once."""

    def __init__(self, failure):
        self.failure = failure

    def state_dict(self):
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return {"value": torch.ones(4)}

    def load_state_dict(self, state):
        raise NotImplementedError


def save_where_a_rank_fails(rank, folder):
    """Saves and waits, while one rank cannot return its state; then saves again, and closes."""
    warnings.simplefilter("ignore")
    export = Export(folder / "models" / "{}", every=1, publish=Publish(folder / "published"))
    manager = CheckpointManager(folder / "run", save_every=1, export=export)
    state = {"model": {"weight": torch.ones(3)}, "other": StateOf(ValueError("none") if rank.index == 1 else None)}
    failed = attempt(lambda: manager.save(1, state, wait=True))
    manager.save(2, state, wait=True)
    manager.close()
    return [type(error).__name__ for error in failed.causes.values()]


def test_a_save_that_one_rank_fails_waits_for_no_publication(tmp_path):
    """The failed rank raises, and does not take part in the agreement about publishing."""
    assert run_ranks(2, save_where_a_rank_fails, tmp_path) == [["StagingError"], ["ValueError"]]
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["2"]
    assert [(version.version, version.step) for version in list_versions(tmp_path / "published")] == [(1, 2)]


def publish_in_vain(rank, folder):
    """Exports two steps that cannot be published; returns the errors of `wait` and `close`."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(8, 4), init_device_mesh("cpu", (rank.world_size,)), [Shard(0)])
    export = Export(folder / "models" / "{}", every=1, publish=Publish(folder / "a file"))
    manager = CheckpointManager(folder / "run", save_every=1, export=export)
    manager.save(1, {"model": {"weight": weight}})
    waited = attempt(manager.wait)
    manager.save(2, {"model": {"weight": weight}})
    return waited, attempt(manager.close)


@pytest.mark.promise("not-published", reason="with a manager, on every rank")
def test_all_ranks_learn_that_a_model_cannot_be_published(tmp_path):
    """Although one rank publishes for all, all ranks raise its error."""
    (tmp_path / "a file").touch()
    for failures in zip(*run_ranks(2, publish_in_vain, tmp_path), strict=True):
        for failure in failures:
            assert [type(error).__name__ for error in failure.causes.values()] == ["NotPublished"]
        words = {str(error) for failure in failures for error in failure.causes.values()}
        assert len(words) == 1
        assert "a file" in words.pop()
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["1", "2"]
