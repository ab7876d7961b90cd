"""transformers: its Trainer with FSDP2 under `install`, and training of a pretrained model."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dcp_tensorizer import TensorizerStorageWriter, install, open_reader
from dcp_tensorizer.tools import convert

from .jobs import die, digests, is_ours, let_accelerate_shard, run_job

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
FSDP = {
    "fsdp_version": 2,
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "state_dict_type": "SHARDED_STATE_DICT",
}


def _model(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


class _Notes(TrainerCallback):
    """A callback that writes the state at the begin of each step, and dies in a given step."""

    def __init__(self, folder, last):
        self.folder, self.last, self.first = folder, last, None

    def on_step_begin(self, args, state, control, model, optimizer, lr_scheduler, **kwargs):
        trained = digests(get_state_dict(model, getattr(optimizer, "optimizer", optimizer)))
        now = state.global_step, trained, lr_scheduler.state_dict()["last_epoch"]
        self.first = self.first or now
        torch.save(now, self.folder / f"state-{state.global_step}-{args.process_index}")
        if state.global_step == self.last:
            die()


def _train(rank, folder, last, resume):
    """Saves each step; returns the state at the begin of the first one."""
    del rank
    install()
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=5,
        save_steps=1,
        save_total_limit=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        fsdp=True,
        fsdp_config=FSDP,
        report_to=[],
        disable_tqdm=True,
    )
    arguments.device  # noqa: B018 - it sets up the process group
    let_accelerate_shard()
    data = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n} for n in range(40)]
    notes = _Notes(folder, last)
    Trainer(_model(0), arguments, train_dataset=data, callbacks=[notes]).train(resume_from_checkpoint=resume)
    return notes.first


def test_a_killed_trainer_resumes_on_other_numbers_of_ranks(tmp_path):
    """A state saved on two ranks is bit for bit the same on one and three, and old checkpoints are deleted."""
    for name in ("two", "one", "three"):
        (tmp_path / name).mkdir()
    run_job(2, _train, tmp_path / "two", 3, None, killed=True)
    saved = torch.load(tmp_path / "two" / "state-3-0")
    assert [key for key in saved[1] if "exp_avg" in key]
    out = tmp_path / "two" / "out"
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert is_ours(out / "checkpoint-3" / "pytorch_model_fsdp_0")
    assert is_ours(out / "checkpoint-3" / "optimizer_0")
    (out / "checkpoint-4" / "pytorch_model_fsdp_0").mkdir(parents=True)  # as a job that is killed in a save leaves it
    whole = out.glob("checkpoint-*/trainer_state.json")
    newest = max((path.parent for path in whole), key=lambda path: int(path.name.split("-")[1]), default=None)
    assert newest == out / "checkpoint-3"
    for world, name in ((1, "one"), (3, "three")):
        assert run_job(world, _train, tmp_path / name, None, str(newest)) == [saved] * world


def _train_a_pretrained_model(rank, folder):
    """Loads safetensors files into a sharded model, trains it, and saves meanwhile."""
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    model = fully_shard(_model(1))
    state = get_model_state_dict(model)
    dcp.load(state, storage_reader=open_reader(folder / "pretrained"))
    model.load_state_dict(state)
    loaded = digests(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with TensorizerStorageWriter(folder / "trained") as writer:
        for _ in range(3):
            model(torch.arange(8)[None] + rank, labels=torch.arange(8)[None]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            last = digests(get_model_state_dict(model))
            dcp.async_save(get_model_state_dict(model), storage_writer=writer, process_group=group)
    return loaded, last


def test_a_pretrained_model_is_trained_and_given_back(tmp_path):
    """A pretrained model loses no bit on its way through training and `convert` to `from_pretrained`."""
    pretrained = _model(0)
    pretrained.save_pretrained(tmp_path / "pretrained")
    (loaded, trained), _ = run_job(2, _train_a_pretrained_model, tmp_path)
    assert loaded == digests(pretrained.state_dict())
    assert trained != loaded
    convert(tmp_path / "trained", tmp_path / "back", "safetensors")
    pretrained.config.save_pretrained(tmp_path / "back")
    assert digests(LlamaForCausalLM.from_pretrained(tmp_path / "back").state_dict()) == trained
