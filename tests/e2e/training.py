"""The asynchronous-saving recipe's model and state, and comparisons that count bits."""

import math

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

# What a comparison of values would let pass: signed zeros, NaNs with a payload, a denormal.
ODDITIES = (0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800000, 0x00000001)


class ToyModel(nn.Module):
    """The recipe's, and a buffer of odd values."""

    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)
        self.register_buffer("oddities", torch.tensor(ODDITIES, dtype=torch.uint32).view(torch.float32))

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


class AppState(Stateful):
    """The recipe's."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def train(model, optimizer):
    """One step of the recipe."""
    optimizer.zero_grad()
    model(torch.rand(8, 16)).sum().backward()
    optimizer.step()


def full(value):
    """A copy with every DTensor gathered; a collective."""
    if isinstance(value, DTensor):
        if value.is_floating_point() and value.itemsize == 1:  # gloo sends no float8
            return full(value.view(torch.uint8)).view(value.dtype)
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(full(item) for item in value)
    return value


def bits(tensor):
    """The bytes of a tensor's elements in C order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def random_tensor(dtype, shape, seed):
    """A tensor of any bits that its dtype can have; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)
