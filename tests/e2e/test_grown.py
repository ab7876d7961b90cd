"""A vocabulary that grew between two runs: the saved rows are there, and the new ones are as declared."""

import tempfile
from contextlib import suppress

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcp_tensorizer import CheckpointManager, StateMismatch

from ..lab.ranks import run_ranks

WIDTH = 8


class Job:
    """An embedding and a head of a vocabulary, with AdamW."""

    def __init__(self, words, world_size=0, steps=0):
        torch.manual_seed(words)
        self.model = torch.nn.Sequential(torch.nn.Embedding(words, WIDTH), torch.nn.Linear(WIDTH, words))
        if world_size:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world_size,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for _ in range(steps):
            self.model(torch.arange(words)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self):
        """Weights and moments, as wholes."""
        moments = self.optimizer.state_dict()["state"]
        named = dict(self.model.state_dict()) | {
            f"{number}.{name}": value for number, of in moments.items() for name, value in of.items()
        }
        return {
            key: value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for key, value in named.items()
        }


GROW = {"model.0.weight": 0.0, "model.1.*": None}


IN_MEMORY = {"survive": 300, "survive_every": 1, "save_every": 1000}


def _saved(rank, folder, options):
    """Saves step 3; leaves it in memory alone if it is not due."""
    job = Job(11, rank.world_size, steps=3)
    with suppress(ZeroDivisionError), CheckpointManager(folder, stop_signals=(), **options) as manager:
        manager.restore(job.state())
        manager.save(3, job.state())
        raise ZeroDivisionError
    return job.tensors()


def _grown(rank, folder, steps, options):
    """Restores into a larger vocabulary; returns what it was before, and what it is."""
    job = Job(17, rank.world_size, steps)
    before = job.tensors()
    with CheckpointManager(folder, stop_signals=(), **options) as manager:
        assert manager.restore(job.state(), grow=GROW) == 3
        manager.save(4, job.state(), force=True, wait=True)  # so that what is in memory is freed
    after = job.tensors()
    job.model(torch.arange(17)).square().sum().backward()  # the optimizer goes on with all of its state
    job.optimizer.step()
    return before, after


def _check(saved, before, after, *, has_moments):
    for key, value in saved.items():
        rows = value.shape[0] if value.dim() else 0
        assert torch.equal(after[key][:rows] if rows else after[key], value), key
        rest = after[key][rows:] if rows else torch.empty(0)
        if key in ("1.weight", "1.bias"):
            assert torch.equal(rest, before[key][rows:]), key
            assert rest.count_nonzero() == rest.numel() > 0
        else:
            assert rest.count_nonzero() == 0, key
        assert after[key].shape[:1] == ((17,) if rows else ())
    assert bool(before.keys() - {"0.weight", "1.weight", "1.bias"}) == has_moments


@pytest.mark.parametrize("steps", [0, 1], ids=["new optimizer", "optimizer that has taken a step"])
@pytest.mark.parametrize(("ranks", "options"), [(3, {}), (3, IN_MEMORY), (2, IN_MEMORY)], ids=["", "memory", "same"])
def test_ranks_restore_into_a_larger_vocabulary(tmp_path, monkeypatch, steps, ranks, options):
    """Of FSDP2 and AdamW, from storage on other ranks than those that saved, and from memory also on the same."""
    with tempfile.TemporaryDirectory() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        saved = run_ranks(2, _saved, tmp_path, options)[0]
        assert (tmp_path / "step-3").exists() != bool(options)
        for before, after in run_ranks(ranks, _grown, tmp_path, steps, options):
            _check(saved, before, after, has_moments=bool(steps))


def test_one_process_restores_into_a_larger_vocabulary(tmp_path):
    """What is not declared is refused, and so is a smaller one; nothing has changed then."""
    job = Job(11, steps=3)
    with CheckpointManager(tmp_path, stop_signals=()) as manager:
        manager.save(3, job.state(), wait=True)
        larger = Job(17)
        before = larger.tensors()
        for grow in ({}, {"model.0.weight": 0.0}):
            with pytest.raises(StateMismatch, match=r"'model\.1\.weight' is \(11, 8\) in the checkpoint and \(17, 8\)"):
                manager.restore(larger.state(), grow=grow)
        assert all(torch.equal(value, before[key]) for key, value in larger.tensors().items())
        with pytest.raises(StateMismatch, match="shapes differ"):
            manager.restore(Job(9).state(), grow=GROW)
        assert manager.restore(larger.state(), grow=GROW) == 3
        _check(job.tensors(), before, larger.tensors(), has_moments=False)
        for grow, error in (({"w": "x"}, r"^grow\['w'\] must be a number"), (["w"], "^grow must be a dict")):
            with pytest.raises(TypeError, match=error):
                manager.restore(larger.state(), grow=grow)


class Tied(torch.nn.Module):
    """An embedding that is the head, too."""

    def __init__(self, words):
        super().__init__()
        self.embedding, self.middle = torch.nn.Embedding(words, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, words, bias=False)
        self.head.weight = self.embedding.weight

    def step(self, optimizer, words):
        self.head(self.middle(self.embedding(torch.arange(words)))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize("has_moments", [False, True])
def test_a_tied_parameter_grows_by_one_of_its_names(tmp_path, optimizer_class, has_moments):
    """Its moments grow with it, though its other name is left as it is, and others have none yet."""
    model = Tied(11)
    optimizer = optimizer_class(model.parameters())
    model.step(optimizer, 11)
    larger = Tied(17)
    larger_optimizer = optimizer_class(larger.parameters())
    if has_moments:
        larger.middle.requires_grad_(False)
        larger.step(larger_optimizer, 17)
        larger.middle.requires_grad_(True)
    with CheckpointManager(tmp_path, stop_signals=()) as manager:
        manager.save(1, {"model": model, "optimizer": optimizer}, wait=True)
        state = {"model": larger, "optimizer": larger_optimizer}
        assert manager.restore(state, grow={"model.embedding.*": 0.0}, allow_shape_mismatch=True) == 1
    saved = optimizer.state[model.head.weight] | {"weight": model.head.weight}
    loaded = larger_optimizer.state[larger.head.weight] | {"weight": larger.head.weight}
    for name, value in saved.items():
        now = loaded[name]
        assert now.shape == torch.Size(17 if size == 11 else size for size in value.shape)
        rows = len(value) if value.dim() else None
        assert torch.equal(now[:rows] if rows else now, value)
        assert not rows or not now[rows:].count_nonzero()
    larger.step(larger_optimizer, 17)
