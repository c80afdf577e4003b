"""What holds on the CPU holds on an accelerator; skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.codec import Turn, chain, dct, e3m0, identity, int8, random, sym2, threshold, top_k, top_k_tensor
from lowtide.tensors import Entry, Layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

ENTRIES = [Entry("a", (200, 130)), Entry("b", (64, 256)), Entry("c", (77,))]
CODECS = {
    "top": chain(identity(), top_k(1 / 32), sym2()),
    "tensor": chain(top_k_tensor(1 / 32), int8()),
    "threshold": chain(threshold(1 / 16), int8()),
    "random": chain(random(1 / 8), int8()),
    "dense": chain(e3m0()),
}
METHODS = {
    "ddp": {},
    "local_sgd": {"period": 4},
    "diloco": {"period": 4, "momentum": 0.5},
    "decoupled": {"period": 4},
    "sharded": {"period": 4, "exchange": "sharded"},
    "sparseloco": {"period": 4},
    "streaming_diloco": {"period": 4, "fragments": 2, "delay": 1},
    "powersgd": {},
    "des_loc": {"period": 4},
    "fda": {"theta": "interval:4"},
}


@pytest.fixture
def buffer():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(entry.shape, generator=generator) for entry in ENTRIES]


@pytest.mark.parametrize("name", CODECS)
def test_payloads_are_the_same_bytes_on_every_device(name, buffer):
    codec = CODECS[name]
    layout = Layout.build(ENTRIES, codec.chunker)
    here = codec.encode(layout.gather(buffer), layout.grid, Turn())
    there = codec.encode(layout.gather([tensor.cuda() for tensor in buffer]), layout.grid, Turn())
    assert here == there


def test_the_transform_agrees_to_rounding_and_inverts(buffer):
    codec = chain(dct(64), top_k(1 / 32), sym2())
    layout = Layout.build(ENTRIES, codec.chunker)
    here = codec.transform.forward_(layout.gather(buffer), layout.grid)
    there = codec.transform.forward_(layout.gather([tensor.cuda() for tensor in buffer]), layout.grid)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-4)
    back = [torch.empty_like(tensor.cuda()) for tensor in buffer]
    layout.scatter(codec.transform.inverse_(there, layout.grid), back)
    for tensor, copy in zip(buffer, back, strict=True):
        torch.testing.assert_close(copy.cpu(), tensor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_replicas_stay_one_model_on_the_device(name):
    options = METHODS[name]
    method = "decoupled" if name == "sharded" else name

    def worker():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 96), nn.BatchNorm1d(96), nn.Tanh(), nn.Linear(96, 64)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        with lowtide.attach(model, optimizer, method, **options) as sync:
            generator = torch.Generator("cuda").manual_seed(sync.rank)
            for _ in range(24):
                x = torch.randn(32, 70, generator=generator, device="cuda")
                loss = nn.functional.mse_loss(model(x), x[:, :64].sin())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    result = lowtide.simulate(worker, replicas=3)
    assert len(set(result.fingerprints)) == 1
    assert all(losses[-1] < losses[0] for losses in result.returns)
