"""torchtitan's checkpoint manager with this package's storage.

torchtitan's trainer needs a GPU. So its own model, optimizers, schedulers, data loader and adapter to Hugging Face's
names are put together here as the trainer does it, and the gradients are made up.
"""

import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.models.llama3 import model_registry

from dcp_tensorizer.integrations.torchtitan import TensorizerCheckpointManager
from dcp_tensorizer.tools import ConvertOptions, convert

from ..lab.processes import workers
from ..lab.ranks import eventually
from .jobs import die, digests, is_ours, run_job, takes_what_its_base_takes


class _Data(torch.utils.data.IterableDataset):
    """A dataset of numbers that stores its position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while True:
            self.position += 1
            yield {"input": torch.tensor(self.position)}, torch.tensor(0)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class _Job:
    """The state that torchtitan's trainer makes and saves."""

    def __init__(self, folder, manager=TensorizerCheckpointManager, **options):
        dist.init_process_group("gloo")
        self.step = 0
        torch.manual_seed(0)
        spec = model_registry("debugmodel")
        model = replace(spec.model, layers=spec.model.layers[:1]).build()
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        self.model = fully_shard(model)
        self.optimizers = replace(default_adamw(), implementation="foreach").build(model_parts=[self.model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedulers.build(optimizers=self.optimizers, training_steps=10)
        self.data = ParallelAwareDataloader(
            _Data(), dp_rank=dist.get_rank(), dp_world_size=dist.get_world_size(), batch_size=2, num_workers=0
        )
        self.batches = iter(self.data)
        options = {"last_save_model_only": False, **options}
        self.manager = manager.Config(enable=True, interval=1, **options).build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=spec.state_dict_adapter(spec.model, None),
            base_folder=str(folder),
        )

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]

    def train(self):
        next(self.batches)
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.manager.maybe_wait_for_staging()
        self.optimizers.step()
        self.schedulers.step()
        self.step += 1

    def digests(self):
        states = self.model.state_dict(), self.optimizers.state_dict(), self.schedulers.state_dict()
        return self.step, digests(states)


def _train_and_die(rank, folder, manager, mode):
    job = _Job(folder, manager, async_mode=mode, keep_latest_k=2)
    for step in range(1, 5):
        job.train()
        torch.save((job.digests(), job.data.state_dict()), folder / f"state-{step}-{rank}")
        job.manager.save(step)
    job.manager.maybe_wait_for_saving()
    job.train()
    die()


def _resume(rank, folder, options):
    """Returns the digests with which a job begins; trains on, and saves the last step."""
    del rank
    job = _Job(folder, **options)
    assert job.manager.load()
    state, data = job.digests(), job.data.state_dict()
    job.train()
    assert job.digests() != state
    job.manager.save(job.step, last_step=True)
    job.manager.close()
    return state, data


@pytest.mark.parametrize(
    ("manager", "mode"),
    [
        (TensorizerCheckpointManager, "disabled"),
        (TensorizerCheckpointManager, "async"),
        (TensorizerCheckpointManager, "async_with_pinned_mem"),
        (CheckpointManager, "async"),
    ],
)
def test_a_killed_job_resumes(tmp_path, manager, mode):
    """In each mode, and after torchtitan's own manager, a job resumes with the same bits on one rank and on two."""
    run_job(2, _train_and_die, tmp_path, manager, mode, killed=True)
    assert is_ours(tmp_path / "checkpoint" / "step-4") == (manager is TensorizerCheckpointManager)
    saved = [torch.load(tmp_path / f"state-4-{rank}") for rank in range(2)]
    assert saved[0][0][0] == 4
    assert [key for key in saved[0][0][1] if "exp_avg" in str(key)]
    shutil.copytree(tmp_path, tmp_path / "one")
    assert run_job(2, _resume, tmp_path, {"async_mode": mode}) == saved
    assert is_ours(tmp_path / "checkpoint" / "step-5")
    without_data = {"async_mode": mode, "exclude_from_loading": ["dataloader"]}  # torchtitan reshards none
    assert run_job(1, _resume, tmp_path / "one", without_data)[0][0] == saved[0][0]


def _purge(rank, folder):
    """Returns the checkpoints that exist during a save, after its commit, and after a failed save."""
    job = _Job(folder, async_mode="async", keep_latest_k=2)
    job.manager.save(1)
    job.manager.save(2)
    job.manager.maybe_wait_for_saving()
    for process in workers():
        process.suspend()
    job.manager.save(3)
    names = [_committed(folder)]
    for process in workers():
        process.resume()
    job.manager.maybe_wait_for_saving()
    if rank == 0:
        names.append(eventually(lambda: (now := _committed(folder)) == ["step-2", "step-3"] and now))
        (folder / "checkpoint" / "step-4").write_text("in the way")
    dist.barrier()
    job.manager.save(4)
    with pytest.raises(CheckpointException, match="step-4"):
        job.manager.maybe_wait_for_saving()
    job.manager.save(5)
    job.manager.close()
    dist.barrier()
    return [*names, _committed(folder)]


def _committed(folder):
    return sorted(path.parent.name for path in folder.glob("checkpoint/*/.metadata"))


def test_old_checkpoints_are_removed_when_a_new_one_is_committed(tmp_path):
    """Old checkpoints are removed after the commit of a new one, not at its begin or after a failure."""
    first, _ = run_job(2, _purge, tmp_path)
    assert first == [["step-1", "step-2"], ["step-2", "step-3"], ["step-3", "step-5"]]


def _export(rank, folder):
    del rank
    job = _Job(folder, async_mode="async", last_save_in_hf=True, last_save_model_only=True)
    job.train()
    weights = digests(job.model.state_dict())
    job.manager.save(job.step, last_step=True)
    job.manager.close()
    return weights


def _initial(rank, folder, options):
    del rank
    job = _Job(folder, **options)
    assert job.manager.load()
    job.manager.close()
    return digests(job.model.state_dict())


def test_hugging_faces_names_out_and_in(tmp_path):
    """torchtitan exports the last step, and another job begins with the export."""
    weights = run_job(2, _export, tmp_path / "exported")
    exported = tmp_path / "exported" / "checkpoint" / "step-1"
    assert "model.embed_tokens.weight" in load_file(next(exported.glob("*.safetensors")))
    options = {"initial_load_path": str(exported), "initial_load_in_hf": True}
    assert run_job(1, _initial, tmp_path / "new", options) == weights[:1]


def _save_model(rank, folder):
    """Saves a model in each format that `initial_load_path` may name."""
    del rank
    job = _Job(folder, async_mode="async")
    job.train()
    job.manager.save(1)
    job.manager.close()
    return digests(job.model.state_dict())


def test_the_initial_checkpoint_may_be_of_any_format(tmp_path):
    """`initial_load_path` may be a checkpoint of this package, of torch, or of safetensors files."""
    (weights,) = run_job(1, _save_model, tmp_path / "ours")
    ours = tmp_path / "ours" / "checkpoint" / "step-1"
    convert(ours, tmp_path / "torch", "dcp")
    model = ConvertOptions(include=["tok_embeddings*", "layers*", "norm*", "lm_head*"])
    convert(ours, tmp_path / "safetensors", "safetensors", options=model)
    for path in (ours, tmp_path / "torch", tmp_path / "safetensors"):
        assert run_job(1, _initial, tmp_path / f"new-{path.name}", {"initial_load_path": str(path)}) == [weights]


def test_methods_take_what_those_of_torchtitan_take():
    """Overridden methods take each argument of torchtitan's by position and by name."""
    names = takes_what_its_base_takes(TensorizerCheckpointManager, "dcp_tensorizer.integrations.torchtitan")
    assert names >= {"__init__", "dcp_save", "dcp_load"}
