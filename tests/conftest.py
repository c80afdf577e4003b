"""What every test starts from: one thread, a fixed seed, and properties tried in the same order each time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Deadlines measure the machine, and a drawn example that fails only now and then is a test that needs luck.
settings.register_profile("lowtide", deadline=None, derandomize=True)
settings.load_profile("lowtide")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
