"""lowtide: train one PyTorch model on machines joined by thin wires, and count every byte."""

from lowtide.errors import (
    AgreementError,
    ConfigError,
    LowtideError,
    ModelError,
    PayloadError,
    PeerLostError,
    StateError,
    TransportError,
)
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
from lowtide.sync.plan import Method, Plan
from lowtide.sync.round import Report
from lowtide.train.attach import attach
from lowtide.train.buffers import recalibrate
from lowtide.train.session import Session
from lowtide.train.settings import Settings
from lowtide.train.simulate import SimulationResult, simulate
from lowtide.train.stats import Stats
from lowtide.transport.link import Link
from lowtide.version import __version__

__all__ = [
    "AgreementError",
    "ConfigError",
    "Link",
    "LowtideError",
    "Method",
    "ModelError",
    "PayloadError",
    "PeerLostError",
    "Plan",
    "Report",
    "Session",
    "Settings",
    "SimulationResult",
    "StateError",
    "Stats",
    "TransportError",
    "__version__",
    "attach",
    "ddp",
    "decoupled",
    "demo",
    "des_loc",
    "diloco",
    "eager",
    "fda",
    "local_sgd",
    "muloco",
    "noloco",
    "powersgd",
    "recalibrate",
    "simulate",
    "sparseloco",
    "sparta",
    "streaming_diloco",
]
