"""Plans and methods: what goes together, what is refused, and what they say of themselves."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.codec import chain, dct, top_k
from lowtide.errors import ConfigError
from lowtide.sync import Method, Plan
from lowtide.sync.exchange import gathered, masked, pairs, sharded, summed
from lowtide.sync.methods import (
    ddp,
    decoupled,
    demo,
    des_loc,
    diloco,
    eager,
    fda,
    local_sgd,
    muloco,
    noloco,
    powersgd,
    sparseloco,
    sparta,
    streaming_diloco,
)
from lowtide.sync.outer import assign, assign_delta, inner, nesterov, private_nesterov, sgd
from lowtide.sync.outer import eager as eager_rule
from lowtide.sync.residual import error_feedback
from lowtide.sync.signal import delta, gradient, optimizer_state, parameters
from lowtide.sync.when import every, one_late


def plan(**parts) -> Plan:
    return Plan(**{"when": every(5), "signal": delta(), "exchange": summed(), "outer": sgd()} | parts)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"outer": assign()}, "Assign steps no anchor, which does not fit Delta"),
        ({"outer": assign_delta()}, "AssignDelta steps no anchor, which does not fit Delta"),
        ({"outer": inner()}, "Inner steps no anchor, which does not fit Delta"),
        ({"signal": gradient()}, "SGD steps an anchor, which does not fit Gradient"),
        ({"signal": parameters(), "outer": nesterov()}, "Momentum steps an anchor, which does not fit Live"),
        ({"signal": optimizer_state("exp_avg")}, "SGD steps an anchor, which does not fit Live"),
        (
            {"outer": eager_rule(sgd()), "exchange": gathered(chain(dct(64), top_k(1 / 8)))},
            "Eager reads what was sent, so its codec cannot transform",
        ),
        (
            {"signal": parameters(), "outer": assign_delta(), "residual": error_feedback(1.0)},
            "AssignDelta reads the signal itself, but a residual is added to it",
        ),
        (
            {"signal": gradient(), "outer": inner(), "when": every(5, delay=1)},
            "a gradient is needed at once, but delay=1",
        ),
        ({"signal": gradient(), "outer": inner(), "when": one_late(5)}, "a gradient is needed at once, but delay=5"),
        (
            {"when": one_late(5), "residual": error_feedback(1.0)},
            "a residual needs each round decided before the next, but delay=5 is not under period=5",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(parts, message):
    with pytest.raises(ConfigError, match=message) as error:
        plan(**parts)
    assert "\nhint: " in str(error.value)


def test_a_delta_is_never_written_to_the_parameters_by_default():
    """`assign` is the default rule; for a delta it would replace the model by its last change."""
    with pytest.raises(ConfigError, match="does not fit Delta"):
        Plan(when=every(20), signal=delta(), exchange=gathered())
    assert Plan(when=every(20), signal=parameters(), exchange=gathered()).outer == assign()


def test_plans_on_gradients_run_before_the_inner_step():
    assert plan(signal=gradient(), outer=inner()).before_step
    assert not plan().before_step
    assert not plan(signal=optimizer_state("exp_avg"), outer=assign()).before_step


@pytest.mark.parametrize(
    ("parts", "private"),
    [
        ({}, False),
        ({"exchange": gathered()}, False),
        ({"exchange": sharded()}, False),
        ({"exchange": pairs(2)}, True),
        ({"exchange": masked(0.1)}, True),
        ({"outer": private_nesterov()}, True),
        ({"outer": eager_rule(sgd())}, True),
    ],
)
def test_a_plan_is_private_where_its_exchange_or_its_rule_is(parts, private):
    assert plan(**parts).private is private
    assert Method("mine", (plan(), plan(**parts))).private is private


def test_a_plan_and_a_method_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().when = every(1)
    with pytest.raises(TypeError, match="does not support item assignment"):
        diloco().options["period"] = 3


def test_a_method_without_a_plan_is_refused():
    with pytest.raises(ConfigError, match="method 'empty' has no plan"):
        Method("empty", ())


NAMED = [
    ddp, decoupled, demo, des_loc, diloco, eager, fda, local_sgd, muloco, noloco, powersgd, sparseloco, sparta,
    streaming_diloco,
]  # fmt: skip


@pytest.mark.parametrize("make", NAMED)
def test_a_method_says_its_name_its_options_its_source_and_its_state(make):
    method = make()
    assert method.name == make.__name__
    assert str(method).startswith(f"{method.name}(")
    assert method.reference
    assert method.state
    assert "State:" in make.__doc__
    assert "Payload" in make.__doc__
    assert ">>> " in make.__doc__


@pytest.mark.parametrize("make", NAMED)
def test_every_option_shows_in_what_a_method_says(make):
    """Replicas compare this text before they start: what it leaves out could differ unseen."""
    import inspect

    assert set(inspect.signature(make).parameters) <= set(make().options) | OPTIONAL.get(make, set())


OPTIONAL = {sparta: {"outer_lr", "momentum"}}  # of the DiLoCo beside it, if there is one


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (diloco, {"period": 7}), (diloco, {"outer_lr": 0.3}), (diloco, {"momentum": 0.3}), (diloco, {"bits": 8}),
        (decoupled, {"period": 7}), (decoupled, {"density": 0.5}), (decoupled, {"bits": 4}),
        (decoupled, {"transform": "none"}), (decoupled, {"feedback": 0.5}), (decoupled, {"outer_lr": 0.5}),
        (decoupled, {"exchange": "sharded"}), (decoupled, {"preset": "authors"}), (decoupled, {"preset": "resync"}),
        (decoupled, {"preset": "nesterov"}),
        (demo, {"density": 0.5}), (demo, {"feedback": 0.5}), (demo, {"bits": 8}), (demo, {"transform": "none"}),
        (demo, {"sign": False}),
        (des_loc, {"period": 7}), (des_loc, {"first_period": 7}), (des_loc, {"second_period": 7}),
        (eager, {"period": 7}), (eager, {"outer_lr": 0.3}), (eager, {"momentum": 0.3}),
        (fda, {"theta": 0.5}), (fda, {"theta": "epochs:4"}), (fda, {"estimator": "norm"}), (fda, {"check_every": 3}),
        (fda, {"delay": 1, "check_every": 3}), (fda, {"min_interval": 4}), (fda, {"max_interval": 9}),
        (fda, {"rate_power": 1.0}), (fda, {"server": "adam"}), (fda, {"server": "nesterov"}),
        (local_sgd, {"period": 7}), (local_sgd, {"switch_at": 7}),
        (muloco, {"period": 7}), (muloco, {"outer_lr": 0.3}), (muloco, {"momentum": 0.3}), (muloco, {"bits": 4}),
        (muloco, {"feedback": 0.9}),
        (noloco, {"period": 7}), (noloco, {"group": 3}), (noloco, {"outer_lr": 0.3}), (noloco, {"momentum": 0.3}),
        (noloco, {"pull": 0.1}), (noloco, {"seed": 5}),
        (powersgd, {"rank": 2}), (powersgd, {"seed": 5}),
        (sparseloco, {"period": 7}), (sparseloco, {"density": 0.5}), (sparseloco, {"bits": 8}),
        (sparseloco, {"feedback": 0.5}), (sparseloco, {"outer_lr": 0.5}), (sparseloco, {"clip": True}),
        (sparta, {"density": 0.5}), (sparta, {"period": 7}), (sparta, {"delay": 1, "period": 2}), (sparta, {"seed": 5}),
        (sparta, {"diloco_period": 100}),
        (streaming_diloco, {"period": 60}), (streaming_diloco, {"fragments": 5}), (streaming_diloco, {"delay": 2}),
        (streaming_diloco, {"alpha": 0.1}), (streaming_diloco, {"outer_lr": 0.1}),
        (streaming_diloco, {"momentum": 0.1}), (streaming_diloco, {"bits": 32}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_every_option_changes_the_plans_and_the_text(make, other):
    assert make(**other).plans != make().plans
    assert str(make(**other)) != str(make())


def test_an_option_beside_a_preset_wins_and_shows():
    method = decoupled(preset="nesterov", outer_lr=0.25)
    assert method.options["outer_lr"] == 0.25 == method.plans[0].outer.lr
    assert (method.options["density"], method.options["preset"]) == (1 / 8, "nesterov")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decoupled(density=0), r"density must be in \(0, 1\], not 0"),
        (lambda: decoupled(density=1.5), r"density must be in \(0, 1\]"),
        (lambda: decoupled(preset="authors", density=0), r"density must be in \(0, 1\], not 0"),
        (lambda: decoupled(preset="authors", density=2), r"density must be in \(0, 1\], not 2"),
        (lambda: decoupled(bits=3), "bits=3"),
        (lambda: decoupled(bits=0), "bits=0"),
        (lambda: decoupled(transform="fft"), "unknown transform 'fft'; known: dct, none"),
        (lambda: decoupled(transform=""), "unknown transform ''"),
        (lambda: decoupled(preset="authors", transform="fft"), "unknown transform 'fft'"),
        (lambda: decoupled(exchange="gather"), "unknown exchange 'gather'.*\nhint: did you mean 'gathered'"),
        (lambda: decoupled(preset="author"), "unknown preset 'author'.*\nhint: did you mean 'authors'"),
        (lambda: decoupled(feedback=2), r"feedback must be in \[0, 1\]"),
        (lambda: decoupled(outer_lr=0), "outer_lr must be positive"),
        (lambda: decoupled(period=0), "period must be a whole number of at least 1"),
        (lambda: demo(transform="fft"), "unknown transform"),
        (lambda: streaming_diloco(period=31), "period must be a multiple of the fragment count"),
        (lambda: streaming_diloco(delay=10), "delay must be shorter"),
        (lambda: streaming_diloco(bits=8), "sends 4 or 32 bits, not 8"),
        (lambda: streaming_diloco(alpha=2), "alpha must be in"),
        (lambda: sparta(density=0), r"density must be in \(0, 1\], not 0"),
        (lambda: sparta(density=1.5), r"density must be in \(0, 1\], not 1.5"),
        (lambda: noloco(group=1), "a group has at least 2 members, not 1"),
        (lambda: powersgd(rank=0), "rank must be at least 1, not 0"),
        (lambda: diloco(momentum=1.0), r"momentum must be in \[0, 1\)"),
        (lambda: fda(server="adamw"), "unknown server 'adamw'"),
        (lambda: fda(estimator="sketchy"), "unknown estimator 'sketchy'.*\nhint: did you mean 'sketch'"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_work_has_one_exact_error(make, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize(
    ("method", "state"),
    [
        (muloco(), "anchor, momentum"),
        (muloco(bits=4, feedback=0.9), "anchor, residual, momentum"),
        (fda(), "anchor, direction"),
        (fda(estimator="norm"), "anchor"),
        (fda(estimator="norm", server="adam"), "anchor, first, second"),
    ],
)
def test_the_state_that_is_named_is_the_one_that_is_kept(method, state):
    assert method.state == state
