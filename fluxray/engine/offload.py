"""Activations that wait in host memory between forward and backward, copied there and back beside the computation.

    forward    block i computes        | its input goes to the host; then its device memory is given back
    backward   block i is computed     | the input of block i-1 comes back, into new device memory
               again and differentiated|

A tensor keeps its place in the graph meanwhile: only its storage is emptied and filled again, as FSDP does with what it gathers,
so every alias of it is whole again at once. The host's memory is page-locked and used again; after the first step nothing is
allocated there. Device memory is allocated and freed in the order of the computing stream, which has waited for the copies, so
that neither stream can meet memory that the other still uses.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fluxray.engine.stream_buffers import HostBuffers
from fluxray.engine.stream_transfers import Event, Transfers
from fluxray.protocols import BlockStack, State


class HostPool:
    """Places in host memory, page-locked for a GPU. One that is given back is taken again where it is large enough."""

    def __init__(self, page_locked: bool):
        self._page_locked = page_locked
        self._free: list[HostBuffers] = []
        self.num_bytes = 0

    def take(self, num_bytes: int) -> HostBuffers:
        """Return the smallest free place of at least so many bytes, or a new one."""
        fitting = [place for place in self._free if place.buffers[0].numel() >= num_bytes]
        if not fitting:
            self.num_bytes += num_bytes
            return HostBuffers([num_bytes], self._page_locked)
        found = min(fitting, key=lambda place: place.buffers[0].numel())
        self._free.remove(found)
        return found

    def give(self, place: HostBuffers) -> None:
        """Take a place back."""
        self._free.append(place)


class _Item:
    """One storage, its place on the host, and the event that its last copy is done."""

    def __init__(self, tensor: Tensor, pool: HostPool):
        self.storage = tensor.untyped_storage()
        self.num_bytes = self.storage.nbytes()
        self.device = tensor.device
        self.place = pool.take(self.num_bytes)
        self.done: Event = None

    @property
    def host(self) -> Tensor:
        return self.place.buffers[0][: self.num_bytes]

    @property
    def on_device(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)


class Parcel:
    """Tensors that leave together and come back together: sent when made, then `leave`, `fetch`, `arrive`, in this order."""

    def __init__(self, tensors: Sequence[Tensor], pool: HostPool, transfers: Transfers):
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._pool, self._transfers = pool, transfers
        self.items = [_Item(tensor, pool) for tensor in storages.values()]
        self._is_fetched = self._has_arrived = False
        ready = transfers.mark()
        for item in self.items:
            item.done = transfers.write(item.host, item.on_device, (ready,))

    def leave(self) -> None:
        """Give the device memory back once the copies are done; what has been queued before may use it until then."""
        for item in self.items:
            self._transfers.wait(item.done)
            item.storage.resize_(0)

    def fetch(self) -> None:
        """Begin to copy everything back, unless that has been done."""
        if self._is_fetched:
            return
        self._is_fetched = True
        for item in self.items:
            item.storage.resize_(item.num_bytes)
        ready = self._transfers.mark()  # what had the memory before is done by then
        for item in self.items:
            item.done = self._transfers.fetch(item.on_device, item.host, (ready, item.done))

    def arrive(self) -> None:
        """Let what is computed from here on find the tensors whole, and give the places on the host back."""
        if self._has_arrived:
            return
        self.fetch()
        self._has_arrived = True
        for item in self.items:
            self._transfers.wait(item.done)
            self._pool.give(item.place)


class Offload:
    """Sends the inputs of blocks to the host. `pool` is what they take of it."""

    def __init__(self, transfers: Transfers, device: torch.device):
        self._transfers = transfers
        self.pool = HostPool(device.type == "cuda")

    def send(self, tensors: Sequence[Tensor]) -> Parcel:
        """Begin to copy tensors to the host."""
        return Parcel(tensors, self.pool, self._transfers)


def offload_inputs(stack: BlockStack, offload: Offload) -> None:
    """Let the inputs of all blocks but the last wait on the host; the blocks are checkpointed, so nothing else is kept of them.

    The gradient by a block's output tells that its backward begins: its input must have come back then, and the one of the
    block before may begin to.
    """

    def run_blocks(state: State) -> State:
        if not torch.is_grad_enabled():
            return BlockStack.run_blocks(stack, state)
        parcels: list[Parcel] = []
        for block in stack.blocks[:-1]:
            parcels.append(offload.send(state.carry))
            state = block(state)
            parcels[-1].leave()
            _before_backward(state, parcels[-1], parcels[-2] if len(parcels) > 1 else None)
        state = stack.blocks[-1](state)
        _before_backward(state, None, parcels[-1] if parcels else None)
        return state

    stack.run_blocks = run_blocks


def _before_backward(state: State, own: Parcel | None, next_one: Parcel | None) -> None:
    def prepare(_: Tensor) -> None:
        if own is not None:
            own.arrive()
        if next_one is not None:
            next_one.fetch()

    for tensor in state.carry:
        if tensor.requires_grad:
            tensor.register_hook(prepare)
