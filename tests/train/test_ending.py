from __future__ import annotations

import pytest
import torch
from tests.train.loops import PRIVATE, Flaky, Run, case, rank

from lowtide import TransportError, simulate
from lowtide.train.agreement import digest
from lowtide.train.ending import average
from lowtide.train.simulate import current_replica


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_the_mean_of_all_replicas_is_what_all_end_with(name):
    def worker():
        run = case(name).train(1, 5)
        before = [p.detach().clone() for p in run.model.parameters()]
        average(run.sync.engine)
        return before, [p.detach().clone() for p in run.model.parameters()]

    befores, afters = zip(*simulate(worker, replicas=3).returns, strict=True)
    for at, after in enumerate(afters[0]):
        torch.testing.assert_close(after, torch.stack([before[at] for before in befores]).mean(0))
    assert len({digest(after) for after in afters}) == 1


def test_several_plans_average_each_tensor_once():
    def worker():
        run = case("sparta_diloco").train(1, 3)
        seen = run.sync.meter.ledger.total.payload
        average(run.sync.engine)
        return run.sync.meter.ledger.total.payload - seen, sum(p.numel() for p in run.model.parameters())

    for payload, numel in simulate(worker, replicas=2).returns:
        assert payload == 4 * (numel + 1)


def test_a_mean_that_cannot_be_had_leaves_the_model_as_it_was():
    def worker():
        flaky = Flaky(current_replica().transport, 10**9)
        run = Run("noloco", {"period": 2}, extra={"transport": flaky}).train(1, 4)
        before = run.digest()
        flaky.fails_at = 1
        with pytest.raises(TransportError, match="the line is down"):
            run.sync.close()
        return run.digest() == before, run.sync.release is None

    assert simulate(worker, replicas=2).returns == ((True, True),) * 2


def test_replicas_that_are_not_finite_do_not_spoil_the_mean():
    def worker():
        run = Run("noloco", {"period": 4}).train(1, 4)
        if rank() == 1:
            with torch.no_grad():
                run.model.second.bias[0] = torch.nan
        run.sync.close()
        return run.digest(), all(bool(p.isfinite().all()) for p in run.model.parameters())

    one, other = simulate(worker, replicas=2).returns
    assert one == other
    assert one[1]
