"""Estimators of how far replicas have spread: what they equal, what they bound, what they cost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.sync.spread import Sketch, estimator, sketch

EXACT, NORM, LINEAR, LARGEST = (estimator(name) for name in ("exact", "norm", "linear", "max_norm"))


def variance(drifts: torch.Tensor) -> float:
    """mean ||w_k - mean w||^2."""
    return float((drifts - drifts.mean(0)).square().sum(1).mean())


def measured(kind, drifts: torch.Tensor, direction: torch.Tensor | None = None) -> float:
    return kind.spread(torch.stack([kind.state(drift, direction) for drift in drifts]))


def unit(size: int, seed: int = 0) -> torch.Tensor:
    direction = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return direction / direction.norm()


@pytest.mark.parametrize("replicas", [1, 2, 7])
def test_exact_is_the_variance_of_the_replicas(replicas):
    drifts = torch.randn(replicas, 500, generator=torch.Generator().manual_seed(replicas), dtype=torch.float64)
    assert measured(EXACT, drifts) == pytest.approx(variance(drifts), rel=1e-10, abs=1e-12)


def drift_set(seed: int) -> torch.Tensor:
    """Aligned, orthogonal, opposite and sparse drifts, of several sizes."""
    generator = torch.Generator().manual_seed(seed)
    replicas, size = 2 + seed % 6, 30
    drifts = torch.randn(replicas, size, generator=generator, dtype=torch.float64)
    kind = seed % 4
    if kind == 0:
        drifts = drifts[:1] + 0.1 * drifts
    elif kind == 1:
        drifts = torch.linalg.qr(drifts.T).Q.T
    elif kind == 2:
        drifts[1::2] = -drifts[::2][: len(drifts[1::2])]
    else:
        drifts *= torch.rand(drifts.shape, generator=generator) < 0.1
    return drifts * 10.0 ** (seed % 5 - 2)


def test_the_cheap_estimates_are_never_below_the_variance():
    for seed in range(1000):
        drifts, direction = drift_set(seed), unit(30, seed)
        exact, linear = measured(EXACT, drifts), measured(LINEAR, drifts, direction)
        norm, largest = measured(NORM, drifts), measured(LARGEST, drifts)
        slack = 1e-12 * norm
        assert norm + slack >= linear >= exact - slack
        assert largest + slack >= norm


def test_equal_drifts_have_no_variance_and_the_linear_estimate_sees_what_its_direction_sees():
    drift, direction = torch.randn(40, dtype=torch.float64), unit(40)
    drifts = drift.expand(3, -1)
    assert measured(EXACT, drifts) == pytest.approx(0.0, abs=1e-9)
    expected = float(drift.square().sum() - (drift @ direction) ** 2)
    assert measured(LINEAR, drifts, direction) == pytest.approx(expected)


def test_a_direction_along_the_mean_drift_makes_the_linear_estimate_exact():
    drifts = torch.randn(4, 40, dtype=torch.float64)
    mean = drifts.mean(0)
    assert measured(LINEAR, drifts, mean / mean.norm()) == pytest.approx(variance(drifts))


def test_orthogonal_drifts_are_overestimated_by_n_over_n_less_one():
    drifts = torch.eye(8, 40, dtype=torch.float64)
    assert measured(NORM, drifts) / variance(drifts) == pytest.approx(8 / 7)


def test_an_estimate_is_never_negative():
    drifts = torch.full((3, 1000), 1e4) + 1e-9
    assert measured(EXACT, drifts) >= 0
    assert measured(LINEAR, drifts, drifts[0] / drifts[0].norm()) >= 0
    assert measured(sketch(), drifts) >= 0


# the sketch

vectors = st.integers(0, 10**6).map(lambda seed: torch.randn(300, generator=torch.Generator().manual_seed(seed)))


def folded(kind: Sketch, drift: torch.Tensor) -> torch.Tensor:
    return kind.state(drift, None)[1:]


@settings(max_examples=25)
@given(vectors, vectors, st.floats(-3, 3))
def test_a_sketch_is_linear(one, other, factor):
    kind = Sketch(3, 20)
    torch.testing.assert_close(
        folded(kind, one.double() + factor * other.double()),
        folded(kind, one.double()) + factor * folded(kind, other.double()),
    )


def test_a_sketch_depends_on_its_seed_alone():
    drift = torch.randn(1000)
    assert torch.equal(folded(Sketch(seed=3), drift), folded(Sketch(seed=3), drift.clone()))
    assert not torch.equal(folded(Sketch(seed=3), drift), folded(Sketch(seed=4), drift))


def energies(drift: torch.Tensor, seeds: int, rows: int, columns: int) -> torch.Tensor:
    """`M2` for many seeds."""
    found = [folded(Sketch(rows, columns, seed), drift).view(rows, columns) for seed in range(seeds)]
    return torch.stack(found).square().sum(2).median(1).values


def test_the_energy_of_one_row_is_unbiased():
    drift = torch.randn(200, generator=torch.Generator().manual_seed(5)).double()
    found = energies(drift, 2000, 1, 25)
    true = float(drift.square().sum())
    assert abs(float(found.mean()) - true) < 3 * float(found.std()) / math.sqrt(2000)


def test_five_rows_of_250_stay_within_their_bound_nine_times_of_ten():
    drift = torch.randn(20_000, generator=torch.Generator().manual_seed(6)).double()
    drift[:50] *= 30  # heavy tails
    found = energies(drift, 200, 5, 250) / drift.square().sum()
    assert float((found <= 1 + 1 / math.sqrt(250)).double().mean()) >= 0.8
    assert float((found - 1).abs().median()) <= 0.05


def test_the_sketch_estimate_is_near_the_variance():
    drifts = torch.randn(6, 5000, generator=torch.Generator().manual_seed(7)) + 0.4
    assert measured(sketch(), drifts) == pytest.approx(variance(drifts.double()), rel=0.1)
    assert measured(NORM, drifts) > 1.15 * variance(drifts.double()), "aligned drifts, or the test says nothing"


def test_the_median_row_decides_whatever_the_others_say():
    states = torch.tensor([[10.0, 1.0, 100.0, -2.0]], dtype=torch.float64)
    assert Sketch(3, 1).spread(states) == 10.0 - 4.0 / (1 + 1)


@pytest.mark.parametrize("size", [1, 249, 250, 251, 1000])
def test_a_sketch_of_any_length_keeps_every_element(size):
    drift = torch.zeros(size)
    drift[-1] = 2.0
    assert float(folded(sketch(), drift).abs().sum()) == 5 * 2.0


# bytes and bad input


@pytest.mark.parametrize(
    ("name", "numbers"), [("norm", 1), ("linear", 2), ("sketch", 1251), ("max_norm", 1), ("exact", 1 + 77)]
)
def test_an_estimator_sends_as_many_numbers_as_it_says(name, numbers):
    kind = estimator(name)
    assert kind.numbers(77) == numbers
    assert kind.state(torch.randn(77), unit(77) if kind.directed else None).numel() == numbers


@pytest.mark.parametrize("name", ["norm", "linear", "sketch", "max_norm", "exact"])
def test_numbers_are_taken_in_double_precision(name):
    """fp32 would lose a thousandth of this sum."""
    drift = torch.full((2**20,), 1.0)
    drift[0] = 4096.0
    kind = estimator(name)
    state = kind.state(drift, drift / drift.norm() if kind.directed else None)
    assert state.dtype == torch.float64
    assert float(state[0]) == 2**20 - 1 + 4096.0**2


@pytest.mark.parametrize(("rows", "columns"), [(0, 250), (-1, 250), (4, 250), (5, 0)])
def test_a_sketch_without_a_median_is_refused(rows, columns):
    with pytest.raises(ConfigError, match=r"odd number of rows and at least one column.*\nhint"):
        sketch(rows, columns)


def test_an_unknown_estimator_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown estimator 'liner'.*\nhint: did you mean 'linear'"):
        estimator("liner")
