"""What becomes of a model's buffers: the running statistics of batch norm and their kin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from lowtide.messages import Sum
from lowtide.train.agreement import ask
from lowtide.transport.base import Transport


def synchronise(transport: Transport, buffers: Mapping[str, Tensor], policy: str) -> None:
    """Apply a policy: `average` floats (counters come from rank 0), take all from `rank0`, or `ignore` them.

    Buffers are never part of a plan: they are plainly averaged and get no outer step. A replica whose floats are not
    finite is left out of the average, and takes it.
    """
    if policy == "ignore" or transport.size == 1:
        return
    floats = [buffer for buffer in buffers.values() if buffer.is_floating_point()]
    counters = [buffer for buffer in buffers.values() if not buffer.is_floating_point() and not buffer.is_complex()]
    if floats:
        _average(transport, floats, first_only=policy == "rank0")
    if counters:
        whole = torch.cat([buffer.detach().flatten().cpu().long() for buffer in counters])
        _put(_total(transport, whole if transport.rank == 0 else torch.zeros_like(whole)), counters)


def _average(transport: Transport, floats: list[Tensor], *, first_only: bool) -> None:
    flat = torch.cat([buffer.detach().flatten().cpu().double() for buffer in floats])
    # one replica's NaN would otherwise become everybody's
    counts = transport.rank == 0 if first_only else bool(flat.isfinite().all())
    total = _total(transport, torch.cat([flat, flat.new_ones(1)]) if counts else flat.new_zeros(flat.numel() + 1))
    if total[-1]:
        _put(total[:-1] / total[-1], floats)


def _total(transport: Transport, flat: Tensor) -> Tensor:
    total = ask(transport, Sum(flat), "buffers").total
    assert total is not None
    return total


def _put(flat: Tensor, buffers: list[Tensor]) -> None:
    pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
    with torch.no_grad():
        for buffer, piece in zip(buffers, pieces, strict=True):
            buffer.copy_(piece.view(buffer.shape))


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def recalibrate(
    model: nn.Module, batches: Iterable[object], forward: Callable[[nn.Module, object], object] | None = None
) -> None:
    """Estimate batch-norm statistics anew, from a few batches under the present parameters.

    For methods whose replicas drift: averaged parameters do not fit averaged statistics.

    >>> model = nn.Sequential(nn.BatchNorm1d(3))
    >>> recalibrate(model, [torch.ones(4, 3), torch.ones(4, 3)])
    >>> model[0].running_mean.tolist(), model.training
    ([1.0, 1.0, 1.0], True)
    """
    modes = {module: module.training for module in model.modules()}
    momenta = {module: module.momentum for module in modes if isinstance(module, _NORMS)}
    for norm in momenta:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the batches
    try:
        model.train()
        with torch.no_grad():
            for batch in batches:
                forward(model, batch) if forward else model(batch)
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        # one by one: some parts may have been put into eval mode on purpose
        for module, training in modes.items():
            module.training = training
