"""Exports of sharded models, which transformers and PEFT load."""

import warnings

import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from dcp_tensorizer import Parts, SafetensorsStorageWriter, open_reader

from .jobs import digests, run_job

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = "*.block_sparse_moe.experts.{}."
RENAME = {
    "*.mlp.experts.gate_up_proj": Parts(f"{EXPERTS}w1.weight", f"{EXPERTS}w3.weight"),
    "*.mlp.experts.down_proj": Parts(f"{EXPERTS}w2.weight"),
    "*.mlp.gate.weight": "*.block_sparse_moe.gate.weight",
}
ADAPTER = {f"*.lora_{half}.default.weight": f"*.lora_{half}.weight" for half in "AB"}


def llama(*, tied):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def mixtral():
    torch.manual_seed(1)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3))


def adapted():
    torch.manual_seed(2)
    model = peft.get_peft_model(llama(tied=False), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:  # zeros at first, which change nothing
            torch.nn.init.normal_(parameter)
    return model


def export(rank, folder):
    """Exports models under FSDP2, and loads a model of Hugging Face into shards."""
    warnings.simplefilter("ignore")
    del rank
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")

    def save(name, state, **options):
        with SafetensorsStorageWriter(folder / name, **options) as writer:
            dcp.async_save(state, storage_writer=writer, process_group=group).result()

    for name, model, options in (
        ("one", llama(tied=False), {}),
        ("many", llama(tied=False), {"dtype": torch.bfloat16, "max_shard_bytes": 6000}),
        ("tied", llama(tied=True), {}),
        ("experts", mixtral(), {"rename": RENAME, "max_shard_bytes": 20_000}),
    ):
        state = get_model_state_dict(fully_shard(model))
        save(name, state, files=[folder / f"config-{name}"], **options)
    adapter = {key: value for key, value in get_model_state_dict(fully_shard(adapted())).items() if "lora_" in key}
    save("adapter", adapter, rename=ADAPTER, files=[folder / "config-adapter"])
    model = fully_shard(mixtral())
    wanted, state = digests(get_model_state_dict(model)), get_model_state_dict(model)
    for tensor in state.values():
        torch.nn.init.zeros_(tensor)
    dcp.load(state, storage_reader=open_reader(folder / "theirs", rename=RENAME), process_group=group)
    return wanted == digests(state)


def test_transformers_and_peft_load_what_is_exported(tmp_path):
    """transformers and PEFT load exports of one file and several, cast, tied, with experts and adapters."""
    kinds = {"one": llama(tied=False), "many": llama(tied=False).bfloat16(), "tied": llama(tied=True)}
    kinds["experts"] = mixtral()
    for name, model in kinds.items():
        model.config.save_pretrained(tmp_path / f"config-{name}")
    adapted().peft_config["default"].save_pretrained(tmp_path / "config-adapter")
    mixtral().save_pretrained(tmp_path / "theirs")
    assert run_job(2, export, tmp_path) == [True, True]
    for name, model in kinds.items():
        loaded, notes = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert {key: found for key, found in notes.items() if found} == {}
        assert digests(loaded.state_dict()) == digests(model.state_dict())
        assert loaded.dtype == model.dtype
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 2
    theirs, ours = load_file(tmp_path / "theirs" / "model.safetensors"), {}
    for file in (tmp_path / "experts").glob("*.safetensors"):
        ours |= load_file(file)
    assert digests(ours) == digests(theirs)
    tokens, wanted = torch.arange(8)[None], adapted()
    found = peft.PeftModel.from_pretrained(llama(tied=False), tmp_path / "adapter")
    assert torch.equal(found(tokens).logits, wanted(tokens).logits)
    assert not torch.equal(found(tokens).logits, llama(tied=False)(tokens).logits)
