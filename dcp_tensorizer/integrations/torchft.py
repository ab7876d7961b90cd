"""Checkpoint transport for torchft, which sends a healthy replica's state to joining ones: `TensorizerTransport`."""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from .._memory.checkpoint import StateCheckpoint, StateReader, state_part
from .._memory.client import KeeperProcess
from .._memory.copies import address_of, address_towards, is_local
from .._memory.protocol import OpenToPeers, StateHead
from .._memory.replicas import RemotePart
from .._memory.runtime_directory import job_name
from .._memory.wire import SECRET_BYTES, Address
from .._runtime.threads import cores
from .._staging.saves import StagedSaves
from .._staging.stager import Stager
from .._tensor_file.encryption import require_libsodium
from ..errors import ReadError, StagingError, StateMismatch, WriteError
from ..planner import LoadPlanner, SavePlanner
from ..reader import ReaderOptions, TensorizerStorageReader

__all__ = ["TensorizerTransport"]

_STRUCTURE = "structure"  # other keys begin with a bracket
_ELSEWHERE = "192.0.2.1"  # reserved (RFC 5737): the route to it is the default route
_PLAIN = (bool, bytes, float, int, str, type(None))
"""The types of values that are sent together, within their containers. Other values are separate items."""


class TensorizerTransport:
    """Transport that heals replicas of torchft through this package's keeper process.

    Pass it to torchft's manager in every replica::

        from dcp_tensorizer.integrations.torchft import TensorizerTransport

        manager = torchft.Manager(..., checkpoint_transport=TensorizerTransport())

    It has the interface of torchft's ``CheckpointTransport``. Differences from torchft's own transports:

    - ``send_checkpoint`` copies the state to shared memory, and returns. A separate process, the keeper, sends the
      copy: encrypted, and only to clients that know the secret in ``metadata``, which torchft distributes.
    - ``recv_checkpoint`` by default compares all bytes with their digests, and loads objects without running code from
      the sender.
    - ``disallow_checkpoint`` frees the copy. A replica that is still reading the copy gets a `ReadError`.

    On a joining replica, torchft logs the metadata of the transport that it reads from. With that log and access to the
    network of the job, anyone can read the state while it is offered. So the next state has another secret.

    Args:
        state_dict: Returns the state to load into, nested like the sent state: torchft's manager sends
            ``{"user": {"default": state}, "torchft": ...}``. Tensors of the same key, shape and dtype are filled in
            place. Tensors without a target are allocated in host memory. Required if the state has DTensors.
        interface: The name or address of the network interface to listen on. None: the first of these that is not the
            loopback interface: the one towards torchft's lighthouse (``TORCHFT_LIGHTHOUSE``), the one to which the
            host's name resolves, and the one of the default route. If there is none, the loopback interface.
        reader_options: ``allow_pickle``, ``verify``, ``thread_count``, ``on_progress``, ``on_report``, as in
            `TensorizerStorageReader`.

    Raises:
        TypeError, ValueError: an option of the reader is invalid.
        WriteError: the keeper cannot be started, or libsodium, which encrypts, is missing.
        OSError: the interface does not exist.
    """

    def __init__(
        self,
        state_dict: Callable[[], Any] | None = None,
        *,
        interface: str | None = None,
        reader_options: ReaderOptions | None = None,
    ) -> None:
        require_libsodium()
        self._state_dict = state_dict
        self._host = _own_address() if interface is None else address_of(interface)
        self._reader_options = dict(reader_options or {})
        TensorizerStorageReader("/", **(reader_options or {}))  # checks them
        self._run = uuid.uuid4().hex
        self._saves = StagedSaves()
        self._held = ""  # the id of the state that is offered
        self._has_offered = False  # the current keeper has offered a state
        self._keeper, self._address = self._start()

    def metadata(self) -> str:
        """Returns the address of the keeper for the other replicas, with the secret.

        The secret changes after an offered state is withdrawn. If the keeper has died, starts another keeper.
        """
        if self._has_offered and not self._held:
            # Use the same keeper: while another starts, the other replicas could finish a step without this replica.
            with suppress(WriteError):  # the keeper has died
                self._address = self._keeper.ask(
                    OpenToPeers(self._host, secrets.token_bytes(SECRET_BYTES), anew=True), Address
                )
            self._has_offered = False
        if not self._keeper.alive:
            self._keeper.end()
            self._keeper, self._address = self._start()
        return msgspec.json.encode(self._address).decode()

    def send_checkpoint(self, dst_ranks: Sequence[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Offers the state of a step to joining replicas, until `disallow_checkpoint`.

        The state may change as soon as this returns.

        Args:
            dst_ranks: The joining replicas; unused, because the metadata alone gives access.
            step: The step that the joining replicas request.
            state_dict: Nested containers of tensors and other values. Of DTensors, this rank's part is sent, for the
                rank with the same number in other replicas.
            timeout: Timeout for the keeper's answer, a minute at most. The keeper does not wait for other replicas.

        Raises:
            StagingError: there is not enough memory, or a tensor cannot be copied; the error names its key.
            WriteError: an object cannot be pickled, and the error names its key; or the keeper does not answer.
        """
        self._keeper.timeout = timeout.total_seconds()
        self.disallow_checkpoint()
        stager = Stager(self._saves, cache_staged_state_dict=False, thread_count=cores())
        staged = stager.stage(_taken_apart(state_dict), is_kept=True)
        staged.staged_save.abandoned = True  # no save waits for it
        buffer, error = staged.staged_save.buffer, staged.staged_save.error
        head = StateHead(_state_id(step), number=step, job=self._run, rank=0, world_size=1, record=None)
        try:
            if buffer is None or error is not None:
                raise StagingError(f"step {step} cannot be sent: {error}")
            planner = SavePlanner(flatten_state_dict=False, enable_plan_caching=False)
            self._keeper.hold(state_part(head, staged, planner), buffer)
        except BaseException:
            if buffer is not None:
                buffer.is_kept = False
            self._saves.close()
            raise
        self._held, self._has_offered = head.id, True

    def disallow_checkpoint(self) -> None:
        """Withdraws the state, and frees its memory."""
        held, self._held = self._held, ""
        try:
            if held:
                with suppress(WriteError):  # a keeper that has ended offers nothing
                    self._keeper.forget([held])
        finally:
            self._saves.close()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Reads the state of a step from the replica whose transport has this ``metadata``.

        Args:
            src_rank: The replica, for messages.
            metadata: The result of `metadata` of that transport.
            step: The offered step.
            timeout: Timeout for the offer. A connection that hangs ends after 60 s, or in the handshake after 10 s.

        Returns:
            The state, with the containers of the sent state.

        Raises:
            ReadError: the state is not offered in time, the other replica cannot be reached or ends, or it uses another
                transport.
            ChecksumMismatch: the state was changed in transit; the error names the key.
            UntrustedObject: an object could run code; nothing has changed.
            StateMismatch: the state has a DTensor, and ``state_dict`` has none on its mesh; or a tensor of
                ``state_dict`` has a different sharding. The error names the key. Tensors of ``state_dict`` may have
                changed.
        """
        try:
            address = msgspec.json.decode(metadata, type=Address)
        except (msgspec.MsgspecError, ValueError):
            raise ReadError(
                "the other replica uses another transport. Use TensorizerTransport in all replicas."
            ) from None
        part = RemotePart(address, _state_id(step), 0)
        try:
            content = part.record(timeout.total_seconds())
            checkpoint = StateCheckpoint(f"the state of replica {src_rank} at step {step}", [(content, part)])
            own = {} if self._state_dict is None else dict(_leaves(self._state_dict()))
            return _read(StateReader(checkpoint, self._reader_options), own)
        finally:
            part.release()

    def shutdown(self, wait: bool = True) -> None:
        """Ends the keeper, and frees all memory. Idempotent."""
        self._held = ""
        self._keeper.end()
        self._saves.close()

    def _start(self) -> tuple[KeeperProcess, Address]:
        """Starts a keeper that other replicas can reach, and that ends with this process."""
        self._has_offered = False
        keeper = KeeperProcess(job_name(f"torchft {self._run}"), self._run, 0.0)
        try:
            return keeper, keeper.ask(OpenToPeers(self._host, secrets.token_bytes(SECRET_BYTES)), Address)
        except BaseException:
            keeper.end()
            raise


class _Sharding(NamedTuple):
    """Sharding of a DTensor, independent of the replica."""

    mesh_names: tuple[str, ...] | None
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> _Sharding:
        names, shape = _name_of(tensor.device_mesh)
        return cls(names, shape, tuple(tensor.placements), tuple(tensor.size()), tuple(tensor.stride()))

    def around(self, local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
        local = local.to(mesh.device_type)
        return DTensor.from_local(
            local, mesh, self.placements, run_check=False, shape=torch.Size(self.size), stride=self.stride
        )


def _name_of(mesh: DeviceMesh) -> tuple[tuple[str, ...] | None, tuple[int, ...]]:
    """Returns a name of a mesh that is the same in all replicas, although their ranks have different numbers."""
    names = mesh.mesh_dim_names
    return None if names is None else tuple(names), tuple(mesh.shape)


def _leaves(state: Any) -> list[tuple[str, Any]]:
    return [(pytree.keystr(path), value) for path, value in pytree.tree_flatten_with_path(state)[0]]


def _taken_apart(state: Any) -> dict[str, Any]:
    """Returns the tensors and objects of a state by their keys, and under `_STRUCTURE` the state's structure.

    The structure has a number for each value in the containers, and for each number a plain value or a key. A DTensor's
    number also has a sharding.
    """
    leaves = _leaves(state)
    tree = pytree.tree_unflatten(range(len(leaves)), pytree.tree_structure(state))
    keys, values, shardings, items = dict[int, str](), dict[int, Any](), dict[int, Any](), dict[str, Any]()
    for number, (key, value) in enumerate(leaves):
        if type(value) in _PLAIN:
            values[number] = value
            continue
        keys[number] = key
        if isinstance(value, DTensor):
            shardings[number] = tuple(_Sharding.of(value))
            value = value.to_local().detach()
        items[key] = value
    return {_STRUCTURE: (tree, keys, values, shardings), **items}


def _read(reader: StateReader, own: Mapping[str, Any]) -> Any:
    """Reads a state from the parts of `_taken_apart`, into tensors of ``own`` where they fit."""
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    target, in_place = dict[str, Any](), set[str]()
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            target[key] = None
            continue
        value = own.get(key)
        value = value.to_local() if isinstance(value, DTensor) else value
        local = value.detach() if isinstance(value, torch.Tensor) else None
        alike = local is not None and (local.shape, local.dtype) == (entry.size, entry.properties.dtype)
        if local is not None and alike and not local.is_meta:
            in_place.add(key)
            target[key] = local
        else:
            target[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    planner = LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(target, metadata, True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    tree, keys, values, shardings = planner.state_dict[_STRUCTURE]
    meshes = {_name_of(value.device_mesh): value.device_mesh for value in own.values() if isinstance(value, DTensor)}

    def value_of(number: int) -> Any:
        if number in values:
            return values[number]
        key = keys[number]
        sharding = _Sharding(*shardings[number]) if number in shardings else None
        if key in in_place:
            there = _Sharding.of(own[key]) if isinstance(own[key], DTensor) else None
            if there != sharding:
                raise StateMismatch(
                    f"{key} must have the same sharding in all replicas: the one that sent it has "
                    f"{sharding or 'no DTensor'}, and this one {there or 'no DTensor'}."
                )
            return own[key]
        if sharding is None:
            return planner.state_dict[key]
        mesh = meshes.get((sharding.mesh_names, sharding.mesh_shape))
        if mesh is None:
            raise StateMismatch(
                f"{key} is a DTensor on a mesh {sharding.mesh_names} of shape {sharding.mesh_shape}, and no tensor "
                f"here is on such a mesh. Pass TensorizerTransport the state_dict to load into."
            )
        return sharding.around(target[key], mesh)

    return pytree.tree_map(value_of, tree)


def _state_id(step: int) -> str:
    return f"{step:032x}"


def _own_address() -> str:
    lighthouse = urlsplit(os.environ.get("TORCHFT_LIGHTHOUSE", "")).hostname
    for name in (lighthouse, socket.gethostname(), _ELSEWHERE):
        with suppress(OSError):
            if name is not None and not is_local(address := address_towards(name)):
                return address
    return "127.0.0.1"
