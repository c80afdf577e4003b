"""Named methods: one file each, one short function in it."""

from lowtide.sync.methods.ddp import ddp
from lowtide.sync.methods.decoupled import decoupled
from lowtide.sync.methods.demo import demo
from lowtide.sync.methods.des_loc import des_loc
from lowtide.sync.methods.diloco import diloco
from lowtide.sync.methods.eager import eager
from lowtide.sync.methods.fda import fda
from lowtide.sync.methods.local_sgd import local_sgd
from lowtide.sync.methods.muloco import muloco
from lowtide.sync.methods.noloco import noloco
from lowtide.sync.methods.powersgd import powersgd
from lowtide.sync.methods.sparseloco import sparseloco
from lowtide.sync.methods.sparta import sparta
from lowtide.sync.methods.streaming_diloco import streaming_diloco

__all__ = [
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
    "sparseloco",
    "sparta",
    "streaming_diloco",
]
