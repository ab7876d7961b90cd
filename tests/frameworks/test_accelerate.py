"""Accelerate with FSDP2: `Accelerator.save_state` and `load_state` under `install`."""

import shutil

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from dcp_tensorizer import install
from dcp_tensorizer.tools import convert

from .jobs import die, digests, is_ours, let_accelerate_shard, run_job, run_python


class _Job:
    """A model that Accelerate shards, and its training steps."""

    def __init__(self):
        torch.manual_seed(0)
        let_accelerate_shard()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, state_dict_type="SHARDED_STATE_DICT"
        )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 8))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer.optimizer, 2)
        self.accelerator.register_for_checkpointing(self.scheduler)

    def train(self, steps):
        for _ in range(steps):
            self.model(torch.rand(4, 8)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def digests(self):
        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer)
        return digests({"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()})


def _train_and_die(rank, folder, ours):
    """Saves after three steps, writes the saved digests, and dies after the fourth step."""
    if ours:
        install()
    job = _Job()
    job.train(3)
    job.accelerator.save_state(folder / "state")
    torch.save(job.digests(), folder / f"digests-{rank}")
    job.train(1)
    die()


def _resume(rank, folder, source, target, ours):
    """Returns the digests with which a job resumes, and saves its state again."""
    del rank
    if ours:
        install()
    job = _Job()
    job.accelerator.load_state(folder / source)
    resumed = job.digests()
    job.accelerator.save_state(folder / target)
    job.train(1)
    assert job.digests() != resumed
    return resumed


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Returns a folder with the state that a killed job of two ranks has saved, and its digests."""
    folder = tmp_path_factory.mktemp("killed")
    run_job(2, _train_and_die, folder, True, killed=True)
    saved = torch.load(folder / "digests-0")
    assert [key for key in saved if "exp_avg" in key]
    return folder, saved


def test_a_killed_job_resumes_on_other_numbers_of_ranks(killed):
    """A state saved on two ranks is bit for bit the same on one rank and on three."""
    folder, saved = killed
    for world in (1, 3):
        assert run_job(world, _resume, folder, "state", f"again-{world}", True) == [saved] * world
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            assert is_ours(folder / "state" / name)
            assert is_ours(folder / f"again-{world}" / name)


def test_merging_weights(killed):
    """Accelerate's command `merge_fsdp_weights` makes a file that `from_pretrained` loads."""
    folder, saved = killed
    arguments = ["merge-weights", str(folder / "state" / "pytorch_model_fsdp_0"), str(folder / "merged")]
    done = run_python("-m", "dcp_tensorizer.run", "-m", "accelerate.commands.accelerate_cli", *arguments)
    assert done.returncode == 0, done.stderr
    merged = load_file(folder / "merged" / "model.safetensors")
    assert {("model", *path): value for path, value in digests(merged).items()} == {
        path: value for path, value in saved.items() if path[0] == "model"
    }


SCRIPT = """
import sys
from tests.frameworks.test_accelerate import _Job

job = _Job()
job.train(1)
job.accelerator.save_state(sys.argv[1])
job.accelerator.wait_for_everyone()  # or else a thread of gloo may end the process: see the FAQ
job.accelerator.end_training()
"""


def test_a_script_that_is_not_changed(tmp_path):
    """Under `dcp_tensorizer.run`, a script that saves by Accelerate saves by this package."""
    (tmp_path / "train.py").write_text(SCRIPT)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["-m", "dcp_tensorizer.run", str(tmp_path / "train.py"), str(tmp_path / "state")]
    done = run_python(*ranks, *script)
    assert done.returncode == 0, done.stderr
    assert is_ours(tmp_path / "state" / "pytorch_model_fsdp_0")
    assert is_ours(tmp_path / "state" / "optimizer_0")


def test_a_job_changes_its_storage_and_goes_back(tmp_path):
    """A job moves from torch's format to this package's by `install`, and back by `convert`."""
    run_job(2, _train_and_die, tmp_path, False, killed=True)
    saved = torch.load(tmp_path / "digests-0")
    assert not is_ours(tmp_path / "state" / "optimizer_0")
    assert run_job(2, _resume, tmp_path, "state", "ours", True) == [saved] * 2
    shutil.copytree(tmp_path / "ours", tmp_path / "back")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert is_ours(tmp_path / "ours" / name)
        shutil.rmtree(tmp_path / "back" / name)
        convert(tmp_path / "ours" / name, tmp_path / "back" / name, "dcp")
    assert run_job(3, _resume, tmp_path, "back", "theirs", False) == [saved] * 3
