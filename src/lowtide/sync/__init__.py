"""The algorithms: plans, rounds, methods. Knows codecs, never a network."""

from lowtide.sync.plan import Method, Plan
from lowtide.sync.replica import ModelReplica, Replica
from lowtide.sync.round import Report, Round
from lowtide.sync.state import RoundState

__all__ = ["Method", "ModelReplica", "Plan", "Replica", "Report", "Round", "RoundState"]
