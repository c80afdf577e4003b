"""What was moved, in numbers: totals by cause and by tensor group, as frozen snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from lowtide.errors import StateError
from lowtide.messages import Tag

UNGROUPED = "other"


@dataclass(frozen=True)
class Totals:
    """Sums over events. `payload` counts once what the replica put out, `sent` and `received` what really moved.

    `dense_reference` is what an fp32 ring all-reduce of the same parameters would have sent.
    """

    events: int = 0
    payload: int = 0
    sent: int = 0
    received: int = 0
    dense_reference: int = 0
    seconds: float = 0.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def to_dict(self) -> dict[str, float]:
        """Plain numbers by name."""
        return asdict(self)


@dataclass(frozen=True)
class Entry:
    """One finished event in the ledger."""

    kind: str
    tag: Tag
    totals: Totals

    @property
    def by_group(self) -> dict[str, Totals]:
        """The event split over the groups of its tag; integers that sum exactly."""
        return split(self.totals, self.tag.groups)


@dataclass(frozen=True)
class Ledger:
    """Everything up to one moment. `by_group` leaves out the dense reference, which belongs to no event."""

    total: Totals = Totals()  # frozen, so one default serves all
    by_cause: Mapping[str, Totals] = field(default_factory=dict)
    by_group: Mapping[str, Totals] = field(default_factory=dict)

    def plus(self, entry: Entry) -> Ledger:
        """The ledger with one more event."""
        by_cause = _added(self.by_cause, {entry.tag.cause: entry.totals})
        return Ledger(self.total + entry.totals, by_cause, _added(self.by_group, entry.by_group))

    def plus_reference(self, nbytes: int, cause: str) -> Ledger:
        """The ledger with more of the dense reference."""
        reference = Totals(dense_reference=nbytes)
        return Ledger(self.total + reference, _added(self.by_cause, {cause: reference}), self.by_group)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Ledger:
        """The ledger that `to_dict` wrote.

        >>> ledger = Ledger().plus_reference(800, "round")
        >>> Ledger.from_dict(ledger.to_dict()) == ledger
        True
        """
        try:
            by_cause, by_group = (
                {str(name): Totals(**each) for name, each in state[key].items()} for key in ("by_cause", "by_group")
            )
            return cls(Totals(**state["total"]), by_cause, by_group)
        except (KeyError, TypeError, AttributeError) as error:
            raise StateError(f"no saved ledger: {error!r}\nhint: pass what to_dict() returned") from error


def _added(table: Mapping[str, Totals], more: Mapping[str, Totals]) -> dict[str, Totals]:
    return {**table, **{name: table.get(name, Totals()) + totals for name, totals in more.items()}}


def split(totals: Totals, groups: tuple[tuple[str, float], ...]) -> dict[str, Totals]:
    """Share `totals` out in proportion; every field sums exactly to what it was, the event counts for each group.

    >>> {name: part.payload for name, part in split(Totals(payload=10), (("a", 1.0), ("b", 1.0), ("c", 1.0))).items()}
    {'a': 3, 'b': 3, 'c': 4}
    """
    # Fractions are weights: they need not sum to one, since rounding may keep them from it.
    whole = sum(fraction for _, fraction in groups)
    if not whole > 0:
        return {UNGROUPED: totals}
    parts: dict[str, Totals] = {}
    done, before = 0.0, _scaled(totals, 0.0)
    for place, (name, fraction) in enumerate(groups, start=1):
        done += fraction
        # Differences of a rounded running sum: nothing is lost between the parts.
        # The last one gets exactly the rest.
        after = _scaled(totals, 1.0 if place == len(groups) else done / whole)
        gain = Totals(*(getattr(after, each.name) - getattr(before, each.name) for each in fields(Totals)))
        parts = _added(parts, {name: replace(gain, events=totals.events)})
        before = after
    return parts


def _scaled(totals: Totals, share: float) -> Totals:
    return Totals(
        payload=int(totals.payload * share),
        sent=int(totals.sent * share),
        received=int(totals.received * share),
        dense_reference=int(totals.dense_reference * share),
        seconds=totals.seconds * share,
    )
