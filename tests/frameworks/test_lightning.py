"""Lightning's Trainer and Fabric with the strategies of `dcp_tensorizer.integrations.lightning`."""

import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from tensorizer import EncryptionParams
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from dcp_tensorizer import WriteError, install
from dcp_tensorizer._staging.staged_save import StagedSave
from dcp_tensorizer.integrations.lightning import TensorizerFabricStrategy, TensorizerStrategy, _local

from ..lab.checkpoints import tensors_of
from ..lab.processes import workers
from ..lab.ranks import kill_self
from ..lab.waiting import WAIT, Gate, hold_memory, in_thread, wait_until_inside
from .jobs import die, digests, is_ours, run_job, takes_what_its_base_takes


class _Module(LightningModule):
    def configure_model(self):
        if not hasattr(self, "layers"):
            self.layers = _layers()
            _shard(self.layers, self.device_mesh)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def training_step(self, batch):
        return self.layers(batch).square().sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.rand(64, 8), batch_size=4)

    def digests(self):
        return digests(get_state_dict(self, self.optimizers().optimizer)), self.lr_schedulers().state_dict()


def _layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 8))


def _shard(module, mesh):
    return fully_shard(module, mesh=mesh["data_parallel"])


def _fit(world, strategy, *callbacks, path=None, **options):
    _fit_module(
        _Module(),
        strategy(data_parallel_size=world, tensor_parallel_size=1, **options),
        *callbacks,
        world=world,
        path=path,
    )


def _fit_module(module, strategy, *callbacks, world=1, path=None, **options):
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        max_steps=6,
        **options,
    )
    trainer.fit(module, ckpt_path=path)


class _EachStep(Callback):
    """A callback that calls a function after each step, before the callbacks that save."""

    def __init__(self, function):
        self.on_train_batch_end = lambda trainer, module, *_: function(trainer, module)


class _Resumed(Callback):
    """A callback that records the state with which a run begins."""

    def on_train_start(self, trainer, module):
        self.step, self.digests = trainer.global_step, module.digests()


def _train_and_die(rank, folder, strategy):
    """Saves at each step in place of the previous save, and dies in the fourth step."""

    def note(trainer, module):
        torch.save(module.digests(), folder / f"digests-{trainer.global_step}-{rank}")
        if trainer.global_step == 4:
            getattr(trainer.strategy, "wait_for_save", lambda: None)()
            die()

    _fit(2, strategy, _EachStep(note), ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_last=True))


def _resume(rank, world, path, strategy):
    del rank
    install()
    resumed = _Resumed()
    _fit(world, strategy, resumed, path=path)
    return resumed.step, resumed.digests


def test_a_killed_trainer_resumes_on_other_numbers_of_ranks(tmp_path):
    """What `ModelCheckpoint` saved on two ranks is the same on one and three, and loads in Lightning."""
    run_job(2, _train_and_die, tmp_path, TensorizerStrategy, killed=True)
    saved = torch.load(tmp_path / "digests-3-0")
    assert [key for key in saved[0] if "exp_avg" in key]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    last = tmp_path / "saved" / "last.ckpt"
    assert is_ours(last)
    for world, strategy in ((1, TensorizerStrategy), (3, TensorizerStrategy), (2, ModelParallelStrategy)):
        assert run_job(world, _resume, world, last, strategy) == [(3, saved)] * world


def test_a_job_of_lightnings_own_storage_goes_on(tmp_path):
    """Checkpoints of Lightning's `ModelParallelStrategy` in torch's format load."""
    run_job(2, _train_and_die, tmp_path, ModelParallelStrategy, killed=True)
    last = tmp_path / "saved" / "last.ckpt"
    assert not is_ours(last)
    saved = torch.load(tmp_path / "digests-3-0")
    assert run_job(3, _resume, 3, last, TensorizerStrategy) == [(3, saved)] * 3


def _save_and_remove(rank, folder):
    """Returns whether an old checkpoint exists while its successor is written, and after a commit or a failure."""
    seen = []

    def step(trainer, module):
        strategy, old = trainer.strategy, folder / f"old-{trainer.global_step}"
        if trainer.global_step > 2:
            return
        trainer.save_checkpoint(old)
        strategy.wait_for_save()
        for process in workers():
            process.suspend()
        trainer.save_checkpoint(folder / "new")  # in the second step it is there, and may not be overwritten
        strategy.remove_checkpoint(old)
        seen.append(old.exists())
        for process in workers():
            process.resume()
        try:
            strategy.wait_for_save()
        except CheckpointException as error:
            seen.extend(type(failure[0]) for failure in error.failures.values())
        trainer.strategy.barrier()
        seen.append(old.exists())
        trainer.strategy.barrier()

    _fit(2, TensorizerStrategy, _EachStep(step), writer_options={"overwrite": False})
    return seen


def test_what_a_save_replaces_is_removed_when_it_is_committed(tmp_path):
    """A replaced checkpoint is removed after the commit, and stays if the save fails."""
    for seen in run_job(2, _save_and_remove, tmp_path):
        assert seen == [True, False, True, WriteError, True]


def _fail_at_last(rank, folder):
    def step(trainer, module):
        if trainer.global_step in (1, 6):
            trainer.save_checkpoint(folder / "same")

    with pytest.raises(CheckpointException, match="overwrite"):
        _fit(2, TensorizerStrategy, _EachStep(step), writer_options={"overwrite": False})
    with pytest.raises(CheckpointException, match="overwrite"):
        _fit(2, TensorizerStrategy, _EachStep(step), writer_options={"overwrite": False})
    with pytest.raises(WriteError, match=r"rank 0 could not write .*meta\.pt"):
        _fit(2, TensorizerStrategy, _EachStep(lambda trainer, _: trainer.save_checkpoint("/proc/nowhere")))


def test_a_failed_save_is_raised(tmp_path):
    """The next save, or the end of training, raises the error of a failed save on every rank."""
    run_job(2, _fail_at_last, tmp_path)


def _requeue(rank, folder, killed_inside):
    """Sends itself Slurm's signal in the fourth step, while an old checkpoint is removed. Returns how the run began."""
    del rank
    slurm = {"JOB_ID": "7", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "train"}
    resumed = _Resumed()

    def step(trainer, module):
        strategy = trainer.strategy
        if trainer.global_step != 4 or killed_inside is None:
            return
        torch.save((trainer.global_step, module.digests()), folder / "saved")
        if killed_inside:
            wait = strategy.wait_for_save
            strategy.wait_for_save = lambda: kill_self() if (folder / "requeue.unfinished").exists() else wait()
        patch.setattr(ModelParallelStrategy, "remove_checkpoint", lambda *_: signal.raise_signal(signal.SIGUSR1))
        strategy.remove_checkpoint(folder / "old")

    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm.items():
            patch.setenv(f"SLURM_{name}", value)
        patch.setattr("lightning.pytorch.trainer.connectors.signal_connector.call", lambda command: kill_self())
        strategy = TensorizerStrategy(data_parallel_size=1, tensor_parallel_size=1)
        plugins = [SLURMEnvironment(auto_requeue=True)]
        _fit_module(_Module(), strategy, resumed, _EachStep(step), plugins=plugins, default_root_dir=folder)
    return resumed.step, resumed.digests


def test_a_requeued_job_resumes(tmp_path):
    """A job that Slurm requeues resumes from the save of its signal handler, or, killed in that save, starts anew."""
    run_job(1, _requeue, tmp_path, True, killed=True)
    assert (tmp_path / "requeue.unfinished" / "meta.pt").is_file()
    ((begun, _),) = run_job(1, _requeue, tmp_path, None)
    assert begun == 0
    run_job(1, _requeue, tmp_path, False, killed=True)
    assert run_job(1, _requeue, tmp_path, None) == [torch.load(tmp_path / "saved")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hpc_ckpt_1.ckpt", "saved"]


def _fabric(world, **options):
    strategy = TensorizerFabricStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1, **options)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(_layers())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
    return fabric, model, optimizer


def _steps(fabric, model, optimizer, count):
    for _ in range(count):
        fabric.backward(model(torch.rand(4, 8)).square().sum())
        optimizer.step()
        optimizer.zero_grad()


def _fabric_digests(model, optimizer):
    return digests(get_state_dict(model.module, optimizer.optimizer))


def _train_fabric_and_die(rank, folder):
    fabric, model, optimizer = _fabric(2, writer_options={"overlap_staging": True})
    for step in range(1, 4):
        _steps(fabric, model, optimizer, 1)
        torch.save(_fabric_digests(model, optimizer), folder / f"digests-{step}-{rank}")
        fabric.save(folder / "last", {"model": model, "optimizer": optimizer, "step": step, "note": "extra"})
    fabric.strategy.wait_for_save()
    _steps(fabric, model, optimizer, 1)
    fabric.save(folder / "next", {"model": model, "optimizer": optimizer, "step": 4, "note": "extra"})
    fabric.strategy.wait_for_save()
    die()


def _resume_fabric(rank, world, path):
    del rank
    fabric, model, optimizer = _fabric(world)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(path, state)
    with pytest.raises(KeyError, match="unknown"):
        fabric.load(path, {**state, "unknown": 0})
    return state["step"], rest, _fabric_digests(model, optimizer)


def test_a_killed_fabric_resumes_on_other_numbers_of_ranks(tmp_path):
    """A Fabric job resumes, also if a killed save left a new `meta.pt` beside old weights."""
    run_job(2, _train_fabric_and_die, tmp_path, killed=True)
    saved = torch.load(tmp_path / "digests-3-0")
    shutil.copy(tmp_path / "next" / "meta.pt", tmp_path / "last" / "meta.pt")
    for world in (1, 3):
        assert run_job(world, _resume_fabric, world, tmp_path / "last") == [(3, {"note": "extra"}, saved)] * world


def _resume_with_others(rank, path):
    """Loads into a scheduler, and into a model with one layer more than was saved."""
    del rank
    fabric, model, optimizer = _fabric(1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        _steps(fabric, model, optimizer, 1)
        scheduler.step()
    fabric.save(path, {"model": model, "scheduler": scheduler})
    fabric.strategy.wait_for_save()
    saved = digests(model.module.state_dict())

    fabric, _, _ = _fabric(1)
    model = fabric.setup_module(_layers().append(nn.Linear(8, 8)))
    fresh = digests(model.module.state_dict())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
    state = {"model": model, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    resumed = state["scheduler"]
    with pytest.raises(CheckpointException, match=r"model\.3\.weight"):
        fabric.load(path, state)
    assert digests(model.module.state_dict()) == fresh
    with pytest.raises(CheckpointException, match="Missing key"):  # only the model may lack keys
        fabric.load(path, {**state, "optimizer": optimizer}, strict=False)
    assert digests(model.module.state_dict()) == fresh
    fabric.load(path, state, strict=False)
    assert state["scheduler"] is resumed
    assert resumed.state_dict() == scheduler.state_dict()
    assert digests(model.module.state_dict()) == {**fresh, **saved}


def test_fabric_loads_a_scheduler_and_not_strictly(tmp_path):
    """A scheduler gets its state in place, and with `strict=False` a new layer stays as it is."""
    run_job(1, _resume_with_others, tmp_path / "saved")


def _train_batch_norm(rank, path, kind):
    """Begins a save whose copy is delayed, and runs a forward pass after it."""
    del rank
    options = {"data_parallel_size": 1, "tensor_parallel_size": 1, "writer_options": {"overlap_staging": True}}

    def save_and_train(strategy, save, model):
        gate, seen = Gate(), model.running_mean.tolist()
        opening = in_thread(lambda: (wait_until_inside(threading.main_thread(), StagedSave.wait_released), gate.open()))
        with pytest.MonkeyPatch.context() as patch:
            hold_memory(patch, gate.pass_through)
            save()
        assert gate.opened.is_set()
        model(torch.rand(4, 8))
        strategy.wait_for_save()
        opening.join(WAIT)
        assert model.running_mean.tolist() != seen
        return seen

    if kind == "fabric":
        strategy = TensorizerFabricStrategy(lambda module, mesh: module, **options)
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(nn.BatchNorm1d(8))
        return save_and_train(strategy, lambda: fabric.save(path, {"model": model}), model.module)
    seen = []

    def step(trainer, module):
        if trainer.global_step == 1:
            seen.append(save_and_train(trainer.strategy, lambda: trainer.save_checkpoint(path), module.norm))

    _fit_module(_Normed(), TensorizerStrategy(**options), _EachStep(step))
    return seen[0]


class _Normed(_Module):
    def configure_model(self):
        if not hasattr(self, "layers"):
            super().configure_model()
            self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch):
        return self.layers(self.norm(batch)).square().sum()


@pytest.mark.parametrize("kind", ["trainer", "fabric"])
def test_buffers_are_saved_as_they_were(tmp_path, kind):
    """With overlap, a save waits for the copy of a model whose buffers the next forward pass changes."""
    (seen,) = run_job(1, _train_batch_norm, tmp_path / "saved", kind)
    found = tensors_of(tmp_path / "saved")
    (key,) = (key for key in found if key.endswith("running_mean"))
    assert found[key].tolist() == seen


ENCRYPTED = {"writer_options": {"encryption": EncryptionParams(b"k" * 32)}}


def _train_encrypted(rank, folder):
    """Saves with a key and loads, with the Trainer; returns the digests saved and loaded."""
    del rank
    saved, resumed = [], _Resumed()
    note = _EachStep(lambda trainer, module: saved.append(module.digests()))
    _fit(1, TensorizerStrategy, note, ModelCheckpoint(folder, every_n_train_steps=4, filename="saved"), **ENCRYPTED)
    _fit(1, TensorizerStrategy, resumed, path=folder / "saved.ckpt", **ENCRYPTED)
    return saved[3], resumed.digests


def _train_encrypted_fabric(rank, folder):
    """The same with Fabric, after a checkpoint without a key has been loaded."""
    del rank
    fabric, model, optimizer = _fabric(1)
    fabric.save(folder / "plain", {"model": model})
    fabric.strategy.wait_for_save()
    fabric, model, optimizer = _fabric(1, **ENCRYPTED, reader_options={"encryption": None})
    fabric.load(folder / "plain", {"model": model})
    fabric, model, optimizer = _fabric(1, **ENCRYPTED)
    state = {"model": model, "optimizer": optimizer}
    _steps(fabric, model, optimizer, 1)
    fabric.save(folder / "saved", state)
    saved = _fabric_digests(model, optimizer)
    _steps(fabric, model, optimizer, 1)
    fabric.load(folder / "saved", state)
    return saved, _fabric_digests(model, optimizer)


@pytest.mark.parametrize("train", [_train_encrypted, _train_encrypted_fabric])
def test_what_is_saved_with_a_key_is_loaded_with_it(tmp_path, train):
    """Loads take the writer's key, unless `reader_options` has another or none."""
    ((saved, loaded),) = run_job(1, train, tmp_path)
    assert loaded == saved


def _save_shards_elsewhere(rank, path):
    fabric, model, _ = _fabric(2)
    average = {key: value.detach().clone() for key, value in model.module.state_dict().items()}
    with pytest.raises(ValueError, match=r"state\['average'\]\['0\.weight'\] is a sharded DTensor"):
        fabric.save(path, {"model": model, "average": average})
    assert not path.exists()
    whole = {key: value.full_tensor() for key, value in average.items()}
    fabric.save(path, {"model": model, "average": whole, "rank": rank})
    fabric.strategy.teardown()
    state = {"model": model, "average": None, "rank": None}
    fabric.load(path, state)
    return state["rank"], digests(state["average"]) == digests(average)


def test_shards_outside_the_model_are_refused(tmp_path):
    """Fabric refuses a sharded tensor outside the model, and saves rank 0's whole values; `teardown` commits them."""
    assert run_job(2, _save_shards_elsewhere, tmp_path / "saved") == [(0, True)] * 2


def _bad_fabric(rank, folder):
    del rank
    fabric, model, _ = _fabric(1)
    for state, words in (({"step": 1}, "got 0"), ({"a": model, "b": model}, "got 2")):
        with pytest.raises(ValueError, match=words):
            fabric.save(folder / "a", state)
    with pytest.raises(TypeError, match="filter is not supported"):
        fabric.save(folder / "a", {"model": model}, filter={"model": lambda key, value: True})
    with pytest.raises(TypeError, match="no_such"):
        TensorizerFabricStrategy(_shard, writer_options={"no_such": 1})


def test_unsupported_arguments_are_refused(tmp_path):
    """Unsupported arguments are refused by name before anything is saved."""
    run_job(1, _bad_fabric, tmp_path)
    assert not list(tmp_path.iterdir())


STRATEGIES = [(TensorizerStrategy, ()), (TensorizerFabricStrategy, (_shard,))]


@pytest.mark.parametrize(("strategy", "first"), STRATEGIES)
def test_each_rank_saves_its_shards(strategy, first):
    """`save_distributed_checkpoint=True` is accepted by name or position, and False is refused."""
    strategy(*first, save_distributed_checkpoint=True)
    assert strategy(*first, "auto", "auto", True, "gloo").process_group_backend == "gloo"
    for arguments in (((), {"save_distributed_checkpoint": False}), (("auto", "auto", False), {})):
        with pytest.raises(ValueError, match="save_distributed_checkpoint=False asks for one file"):
            strategy(*first, *arguments[0], **arguments[1])


@pytest.mark.parametrize(("strategy", "first"), STRATEGIES)
@pytest.mark.parametrize("options", [{"path": "remote", "local": "local"}, {"max_unflushed": 2}])
def test_a_local_folder_is_refused(strategy, first, options):
    """A local folder is refused: Lightning would remove a checkpoint before its successor has arrived at the path."""
    with pytest.raises(ValueError, match=r"or save with CheckpointManager\(local=\.\.\.\)"):
        strategy(*first, writer_options=options)


@pytest.mark.parametrize("strategy", [TensorizerStrategy, TensorizerFabricStrategy])
def test_methods_take_what_those_of_the_base_class_take(strategy):
    """Overridden methods take each argument of the base class by position and by name."""
    assert takes_what_its_base_takes(strategy, "dcp_tensorizer.integrations.lightning") >= {
        "__init__",
        "save_checkpoint",
    }


def test_a_link_to_what_is_not_committed_is_refused(tmp_path):
    """``save_last="link"`` is refused before training, because the link would precede the commit."""
    callback = ModelCheckpoint(tmp_path, save_last="link")
    with pytest.raises(ValueError, match="save_last=True"):
        TensorizerStrategy().setup(SimpleNamespace(checkpoint_callbacks=[callback]))


def test_urls_are_no_paths():
    """A URL is refused, because it would become a local directory."""
    with pytest.raises(ValueError, match="s3://bucket/run is a URL"):
        _local("s3://bucket/run")
    assert _local("saved/last") == Path("saved/last")
