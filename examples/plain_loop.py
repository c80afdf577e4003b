"""A plain PyTorch loop that trains with others: three lines of it are lowtide's.

    python examples/plain_loop.py                                               alone
    torchrun --nproc-per-node 4 examples/plain_loop.py --method decoupled       four processes
    python examples/plain_loop.py --simulate 4 --method decoupled               the same four in one process

The last two print the same fingerprints when torch uses equally many threads (torchrun sets one).
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

import lowtide
from lowtide.train.data import stdlib_text, windows
from lowtide.train.models.gpt import GPT, gpt_tiny


def train(method: str, steps: int, period: int | None) -> float:
    """An ordinary loop over an ordinary loader."""
    torch.manual_seed(0)
    model = GPT(gpt_tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = torch.utils.data.DataLoader(windows(stdlib_text(2_000_000).train, 64), batch_size=8, shuffle=True)

    options = {} if period is None else {"period": period}
    sync = lowtide.attach(model, optimizer, method=method, **options)
    for _, batch in zip(range(steps), sync.shard(loader), strict=False):
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.close()

    stats = sync.stats()
    print(
        f"rank {sync.rank} of {sync.size}: loss {loss.item():.3f} after {stats.steps} steps, "
        f"{stats.rounds} rounds, {stats.sent:,} bytes sent, fingerprint {sync.fingerprint()[:16]}",
        flush=True,
    )
    return loss.item()


def main() -> None:
    """Read the arguments; under a launcher `attach` finds the other processes by itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="decoupled")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--period", type=int, default=None)
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="N replicas in this process")
    arguments = parser.parse_args()
    worker = partial(train, arguments.method, arguments.steps, arguments.period)
    if arguments.simulate:
        torch.set_num_threads(1)
        lowtide.simulate(worker, replicas=arguments.simulate)
    else:
        worker()


if __name__ == "__main__":
    main()
