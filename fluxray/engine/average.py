"""The moving averages of masters that are whole on one device, or sharded by rows: each rank keeps and moves its own rows'."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from fluxray.config.sampling import EmaConfig
from fluxray.engine.masters import Masters
from fluxray.optim.average import DTYPES, move, noise_of, rate_at
from fluxray.optim.restore import restore_average
from fluxray.optim.rows import Rows
from fluxray.optim.states import AVERAGE
from fluxray.protocols import BatchKey, StateItem, StateReader
from fluxray.seeding import derive_seed


class Averages:
    """The average of every trained master.

    A bf16 one is rounded by the place of an element in the whole parameter: equal weights give the same bits on any number of
    ranks, and in either engine.
    """

    def __init__(self, masters: Masters, config: EmaConfig):
        self._masters = masters
        self._decay = config.decay
        self._dtype = DTYPES[config.dtype]
        self._held = {name: rows.local.to(self._dtype, copy=True) for name, rows in self._rows().items()}

    @torch.no_grad()
    def move(self, key: BatchKey) -> None:
        """Move the averages behind the step whose micro-batches have this key."""
        rate, rows = rate_at(self._decay, key.step), self._rows()
        if self._dtype == torch.float32:
            pairs = [(average, rows[name].local) for name, average in self._held.items() if average.numel() > 0]
            torch._foreach_lerp_([average for average, _ in pairs], [master for _, master in pairs], rate)
            return
        seed = derive_seed(key.seed, "rounding", key.step)
        for name, average in self._held.items():
            first = (rows[name].first or 0) * prod(average.shape[1:])
            if average.numel() > 0:
                move(average.view(-1), rows[name].local.reshape(-1), None, rate, noise_of(seed, name), first)

    def state_items(self, name: str) -> Iterator[StateItem]:
        """Yield the average of a parameter, if it has one."""
        if name in self._held:
            yield Rows.of(self._masters.named[name]).item(AVERAGE, name, self._held[name])

    @torch.no_grad()
    def load(self, reader: StateReader) -> list[str]:
        """Take saved averages; one that was not saved begins with its master. Returns the names of those that were rounded."""
        narrowed = []
        for name, rows in self._rows().items():
            average, num_rows = self._held[name], rows.local.shape[0] if rows.local.ndim else None
            if average.numel() == 0:
                continue
            if restore_average(reader, name, average, rows.local, offset=rows.first or 0, num_rows=num_rows):
                narrowed.append(name)
        return narrowed

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute with the averages. fp32 ones change places with the masters; else these wait on the host."""
        waiting = self._exchange() if self._dtype == torch.float32 else self._send_away()
        self._masters.publish()
        try:
            yield
        finally:
            self._take_back(waiting)
            self._masters.publish()

    @torch.no_grad()
    def _exchange(self) -> Mapping[str, Tensor]:
        for name, rows in self._rows().items():
            master = rows.local.clone()
            rows.local.copy_(self._held[name])
            self._held[name].copy_(master)
        return {}

    @torch.no_grad()
    def _send_away(self) -> Mapping[str, Tensor]:
        waiting = {}
        for name, rows in self._rows().items():
            waiting[name] = rows.local.to("cpu", copy=True)
            rows.local.copy_(self._held[name])
        return waiting

    @torch.no_grad()
    def _take_back(self, waiting: Mapping[str, Tensor]) -> None:
        if not waiting:
            self._exchange()
        for name, master in waiting.items():
            Rows.of(self._masters.named[name]).local.copy_(master)

    def _rows(self) -> dict[str, Rows]:
        return {name: Rows.of(master) for name, master in self._masters.named.items() if master.requires_grad}
