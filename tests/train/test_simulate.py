from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lowtide.errors import AgreementError, ConfigError
from lowtide.messages import Gather, Sum, Tag
from lowtide.train.simulate import SimulationResult, current_replica, simulate


def share(event: int, payload: bytes = b"") -> tuple[bytes, ...]:
    return current_replica().transport.start(Gather(payload), Tag("plan", event)).finish().payloads


def numbers() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]  # noqa: NPY002 - the global stream


def drawn(rounds: int) -> list[list[float]]:
    """What a plain loop draws; inside of a simulation it agrees after each draw."""
    values = []
    for event in range(rounds):
        values.append(numbers())
        if current_replica() is not None:
            share(event)
    return values


def test_every_replica_draws_as_if_alone_in_a_process():
    result = simulate(lambda: drawn(3), replicas=3, seed=5)
    for rank in range(3):
        torch.manual_seed(5 + rank)
        np.random.seed(5 + rank)  # noqa: NPY002 - the global stream
        random.seed(5 + rank)
        assert result.returns[rank] == drawn(3)


def test_the_callers_generators_are_put_back():
    def streams():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002

    before = streams()
    simulate(lambda: drawn(2), replicas=2)
    assert streams() == before
    with pytest.raises(ZeroDivisionError):
        simulate(lambda: [numbers(), 1 / 0], replicas=2)
    assert streams() == before


def test_a_large_seed_fits_all_generators():
    assert simulate(numbers, replicas=1, seed=2**40).returns == simulate(numbers, replicas=1, seed=2**40).returns


def test_a_replica_knows_itself_and_outside_there_is_none():
    def worker():
        slot = current_replica()
        assert slot.transport.rank == slot.rank
        return slot.rank, slot.size

    assert current_replica() is None
    assert simulate(worker, replicas=3).returns == ((0, 3), (1, 3), (2, 3))
    assert current_replica() is None


class Session:
    """What attach would leave."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fingerprint(self) -> str:
        return f"{self.name} of {current_replica().rank}"

    def stats(self) -> dict[str, str]:
        return {"name": self.name}


def test_the_last_session_of_each_replica_reports():
    def worker():
        slot = current_replica()
        slot.sessions += [Session("first"), Session("last")] if slot.rank else [Session("only")]

    result = simulate(worker, replicas=2)
    assert result.fingerprints == ("only of 0", "last of 1")
    assert result.stats == ({"name": "only"}, {"name": "last"})


def test_without_a_session_there_is_nothing_to_report():
    result = simulate(lambda: None, replicas=2)
    assert result == SimulationResult(("", ""), (None, None), (None, None), result.seconds, *result_times(result))


def result_times(result):
    return result.compute_seconds, result.wait_seconds


def test_replicas_that_sum_stay_one_model():
    def worker():
        slot = current_replica()
        weights = torch.zeros(4)
        for event in range(5):
            gradient = torch.randn(4)
            weights -= slot.transport.start(Sum(gradient), Tag("plan", event)).finish().total / slot.size
        return weights

    returns = simulate(worker, replicas=4).returns
    assert all(torch.equal(weights, returns[0]) for weights in returns)
    assert not torch.equal(returns[0], simulate(worker, replicas=4, seed=1).returns[0])


def test_time_is_compute_and_waiting_on_the_virtual_clock():
    def worker():
        for event in range(2):
            for _ in range(5):
                current_replica().inner_step()
            share(event)

    result = simulate(worker, replicas=2, link="8mbit/500ms", speeds=[1.0, 0.5], step_seconds=0.1)
    assert result.compute_seconds == pytest.approx((1.0, 2.0))
    assert result.seconds == pytest.approx(2.0 + 2 * 2 * 0.5, rel=1e-3)
    for compute, wait in zip(*result_times(result), strict=True):
        assert compute + wait == pytest.approx(result.seconds)


def test_measured_time_grows_with_the_work():
    def worker():
        matrix = torch.randn(64, 64)
        for _ in range(50 if current_replica().rank == 0 else 1000):
            matrix = torch.tanh(matrix @ matrix)

    result = simulate(worker, replicas=2)
    assert 0 < result.compute_seconds[0] < result.compute_seconds[1] == result.seconds


def test_the_first_error_comes_with_its_rank():
    def worker():
        share(0)
        if current_replica().rank == 2:
            raise KeyError("label")
        share(1)

    with pytest.raises(KeyError, match="label") as error:
        simulate(worker, replicas=4)
    assert error.value.__notes__ == ["raised by replica 2 of 4"]


def test_a_disagreement_is_raised_once():
    with pytest.raises(AgreementError, match="the event is 0 on rank 0; 1 on rank 1"):
        simulate(lambda: share(current_replica().rank), replicas=2)


def test_gradients_flow_whatever_the_caller_has_switched_off():
    def worker():
        weights = torch.ones(2, requires_grad=True)
        weights.sum().backward()
        return weights.grad.sum().item()

    with torch.no_grad():
        assert simulate(worker, replicas=2).returns == (2.0, 2.0)


def test_threads_of_torch_are_as_many_as_the_callers():
    assert simulate(torch.get_num_threads, replicas=2).returns == (torch.get_num_threads(),) * 2


def test_no_replicas_are_refused():
    with pytest.raises(ConfigError, match="replicas must be at least 1: 0"):
        simulate(lambda: None, replicas=0)
