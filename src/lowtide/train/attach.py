"""`attach`: three lines in a plain loop make it train with others."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

import lowtide.sync.methods as named
from lowtide.errors import AgreementError, ConfigError, ModelError, unknown
from lowtide.sync import Method, ModelReplica, Report, Round
from lowtide.sync.outer import Eager
from lowtide.tensors import Layout, entries, local, trainable
from lowtide.train.agreement import agree
from lowtide.train.check import Check
from lowtide.train.engine import Engine
from lowtide.train.hooks import StepHooks, Watch, innermost, owned
from lowtide.train.overrides import Override, Piece, pieces
from lowtide.train.session import Session
from lowtide.train.settings import BUFFERS, Settings
from lowtide.train.simulate import current_replica
from lowtide.train.stepper import Stepper
from lowtide.transport.base import Transport
from lowtide.transport.loopback import Loopback
from lowtide.transport.meter import Meter
from lowtide.transport.process_group import ProcessGroup, available, from_environment
from lowtide.version import __version__

logger = logging.getLogger("lowtide")

METHODS: dict[str, Callable[..., Method]] = {
    "ddp": named.ddp,
    "local_sgd": named.local_sgd,
    "diloco": named.diloco,
    "decoupled": named.decoupled,
    "demo": named.demo,
    "sparseloco": named.sparseloco,
    "streaming_diloco": named.streaming_diloco,
    "eager": named.eager,
    "sparta": named.sparta,
    "noloco": named.noloco,
    "powersgd": named.powersgd,
    "des_loc": named.des_loc,
    "fda": named.fda,
    "muloco": named.muloco,
}

Weight = float | Callable[[], float]


def attach(  # noqa: PLR0913 (one call is all that a user's loop needs to know)
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    method: str | Method = "decoupled",
    *,
    transport: Transport | None = None,
    overrides: Mapping[str, Override] | None = None,
    weight: Weight | None = None,
    buffers: str = "average",
    settings: Settings | None = None,
    on_round: Callable[[Report], None] | None = None,
    **options: object,
) -> Session:
    """Let `model`, which `optimizer` trains in a loop of yours, agree with its replicas by `method`.

    The loop stays as it is: a hook on the optimizer counts its steps and runs the rounds. With several optimizers a
    step counts when each has made one.

    `transport`  where the other replicas are; by default a simulation that runs, else torch's default process group,
                 else what a launcher left in the environment, else nobody: then it is plain training
    `overrides`  other codecs for some parameters: `{"*embedding*": "dense"}`, patterns on names, first match wins
    `weight`     this replica's weight in the means, a number or a function asked at every round
    `buffers`    `average` (batch-norm statistics are averaged at every round), `rank0` or `ignore`
    `options`    of the method, where it is given by name

    >>> model = nn.Linear(4, 2)
    >>> sync = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "diloco", period=10)
    >>> sync.size, sync.close()
    (1, None)
    """
    settings = settings or Settings()
    method = resolve(method, options)
    if buffers not in BUFFERS:
        raise unknown("buffers policy", buffers, BUFFERS)
    parameters = _checked(model)
    optimizers = _optimizers(optimizer)
    owned(parameters, optimizers)
    weigh = _weighed(method, weight)
    cut = pieces(method, entries(model, parameters), overrides or {})
    slot = current_replica()
    meter = Meter(transport or _found(settings))
    replica = ModelReplica(parameters, optimizers)
    rounds = [] if meter.size == 1 and settings.alone == "plain" else _rounds(cut, meter)
    # a simulation's transport serves all sessions of its replica
    ours = transport is None and slot is None
    device = local(next(iter(parameters.values()))).device
    with _failing_aloud(meter, ours=ours):
        if meter.size > 1:
            agree(meter, model, rounds, _card(method, overrides, buffers, settings), check=settings.start == "check")
        for round_ in rounds:
            round_.start(replica, device)
    engine = Engine(rounds, replica, meter, weigh, meter.now)
    watch = Watch(model, parameters, optimizers)
    stepper = Stepper(model, watch, method, engine, meter, buffers, Check(settings.check_every), on_round)
    session = Session(method, stepper, engine, meter, settings)
    gradients = any(round_.plan.before_step for round_ in rounds)
    hooks = StepHooks(optimizers, stepper.before, stepper.after, gradients=gradients)

    def release() -> None:
        hooks.remove()
        if ours and engine.waiting:
            meter.abort("gave its model back with messages on their way")
        if ours:
            meter.close()

    session.release = release
    if slot is not None:
        slot.sessions.append(session)
        stepper.on_step = slot.inner_step
    count = sum(parameter.numel() for parameter in parameters.values())
    logger.info("%s, replica %d of %d, %d parameters", method, meter.rank, meter.size, count)
    return session


@contextmanager
def _failing_aloud(meter: Meter, *, ours: bool) -> Iterator[None]:
    """Tell the peers of an error that they would not know of, and close what was opened."""
    try:
        yield
    except BaseException as error:
        # a disagreement is everybody's error already
        if not isinstance(error, AgreementError):
            meter.abort(f"could not attach: {error!r}")
        if ours:
            meter.close()
        raise


def _weighed(method: Method, weight: Weight | None) -> Callable[[], float]:
    """The weight as a function, where the method can weigh."""
    if weight is not None and any(isinstance(plan.outer, Eager) for plan in method.plans):
        raise ConfigError(
            f"{method.name} uses its own part as 1/N of the mean, so replicas cannot weigh differently\n"
            "hint: leave out weight, or use diloco"
        )
    return _asked(weight)


def resolve(method: str | Method, options: Mapping[str, object]) -> Method:
    """A method from its name and options; unknown ones are refused with the nearest that exists."""
    if isinstance(method, Method):
        if options:
            raise ConfigError(
                f"options {sorted(options)} beside a finished {method}\nhint: give them to the method instead"
            )
        return method
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    known = inspect.signature(METHODS[method]).parameters
    for name in options:
        if name not in known:
            raise unknown(f"option of {method}", name, known)
    return METHODS[method](**options)


def _optimizers(given: object) -> list[Optimizer]:
    """The optimizers that really step; a framework's wrapper need not be an `Optimizer` itself."""
    several = given if isinstance(given, Sequence) and not hasattr(given, "optimizer") else [given]
    found: list[Optimizer] = []
    for each in several:
        inner = innermost(each)
        if not isinstance(inner, Optimizer):
            raise ConfigError(f"no optimizer: {inner!r}\nhint: pass what steps the model, or a list of them")
        found.append(inner)
    return found


def _checked(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters, fit to be averaged."""
    parameters = trainable(model)
    for name, parameter in parameters.items():
        if parameter.dtype == torch.float16:
            raise ModelError(
                f"{name} is float16, and updates would be lost in its rounding\n"
                "hint: keep float32 parameters and train under torch.autocast, or use bfloat16"
            )
        if parameter.is_meta:
            raise ModelError(f"{name} has no data yet (device meta)\nhint: load the weights before you attach")
    double = [name for name, parameter in parameters.items() if parameter.dtype == torch.float64]
    if double:
        logger.warning("%s is float64, but replicas agree in float32: each round rounds it", double[0])
    return parameters


def _found(settings: Settings) -> Transport:
    """The transport that the surroundings offer."""
    slot = current_replica()
    if slot is not None:
        return slot.transport
    kind = available()
    if kind == "group":
        return ProcessGroup(timeout=settings.timeout)
    if kind == "launcher":
        return from_environment(timeout=settings.timeout)
    return Loopback()


def _rounds(cut: Sequence[Piece], meter: Meter) -> list[Round]:
    """One round for each plan and fragment."""
    found = []
    for piece in cut:
        layout = Layout.build(piece.entries, piece.plan.exchange.chunker)
        found.append(Round(piece.plan, layout, piece.name, fragment=piece.fragment, rank=meter.rank, size=meter.size))
    return found


def _card(method: Method, overrides: Mapping[str, Override] | None, buffers: str, settings: Settings) -> dict[str, str]:
    """What replicas must have in common beside their models, in words."""
    chosen = {"check_every": settings.check_every, "start": settings.start, "scale_last": settings.scale_last}
    return {
        "lowtide": __version__,
        "torch": torch.__version__.split("+")[0],
        "method": str(method),
        "overrides": str(dict(overrides or {})),
        "settings": ", ".join(f"{name}={value}" for name, value in chosen.items()) + f", buffers={buffers}",
    }


def _asked(weight: Weight | None) -> Callable[[], float]:
    """The weight as a function that refuses what cannot weigh."""

    def ask() -> float:
        value = 1.0 if weight is None else float(weight() if callable(weight) else weight)
        if not 0 < value < float("inf"):
            raise ConfigError(
                f"weight must be positive, not {value}\nhint: samples or steps since the last round, for example"
            )
        return value

    ask()
    return ask
