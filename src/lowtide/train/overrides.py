"""How the parameters divide into pieces with a plan each: fragments, and groups with a codec of their own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lowtide.codec import Chain, Codec
from lowtide.errors import ConfigError
from lowtide.sync import Method, Plan
from lowtide.sync.exchange import Gathered, gathered, summed
from lowtide.sync.exchange.gathered import Pairs
from lowtide.sync.exchange.low_rank import LowRank
from lowtide.sync.exchange.sharded import Sharded
from lowtide.sync.exchange.summed import Summed
from lowtide.sync.residual import no_residual
from lowtide.tensors import Entry

Override = str | Codec


@dataclass(frozen=True)
class Piece:
    """Some parameters, the plan that handles them, and which beat of its clock they follow."""

    name: str
    plan: Plan
    entries: tuple[Entry, ...]
    fragment: int = 0


def pieces(method: Method, entries: Sequence[Entry], overrides: Mapping[str, Override]) -> list[Piece]:
    """Every parameter once in every plan."""
    groups = _groups(entries, overrides)
    found = []
    for number, plan in enumerate(method.plans):
        for label, (override, members) in groups.items():
            own = overridden(plan, override) if label else plan
            for fragment, part in enumerate(fragments(members, plan.when.fragments)):
                if part:
                    name = f"{method.name}.{number}{label}" + (f"#{fragment}" if plan.when.fragments > 1 else "")
                    found.append(Piece(name, own, part, fragment))
    return found


def _groups(
    entries: Sequence[Entry], overrides: Mapping[str, Override]
) -> dict[str, tuple[Override | None, list[Entry]]]:
    """Entries by the first pattern that fits them; an empty label for those that none fits."""
    groups: dict[str, tuple[Override | None, list[Entry]]] = {"": (None, [])}
    groups |= {f"[{pattern}]": (override, []) for pattern, override in overrides.items()}
    for entry in entries:
        label = next((f"[{pattern}]" for pattern in overrides if fnmatchcase(entry.name, pattern)), "")
        groups[label][1].append(entry)
    for label, (_, members) in groups.items():
        # a pattern that never fits is a misspelt name, or stands behind one that takes all
        if label and not members:
            raise ConfigError(
                f"the override {label[1:-1]!r} fits no parameter\nhint: names look like {entries[0].name!r}"
            )
    return {label: group for label, group in groups.items() if group[1]}


def overridden(plan: Plan, override: Override | None) -> Plan:
    """The plan with another codec: `"dense"` for fp32 as it is."""
    if override != "dense" and not isinstance(override, Chain):
        raise ConfigError(f"an override is 'dense' or a codec, not {override!r}\nhint: chain(top_k(1/16), int8())")
    exchange = plan.exchange
    # elsewhere another exchange would be another method: no gate, no groups, no mask
    if isinstance(exchange, Pairs) or not isinstance(exchange, Gathered | Sharded | LowRank | Summed):
        raise ConfigError(
            f"the exchange {type(exchange).__name__} takes no overrides\n"
            "hint: they fit methods in which all replicas exchange all of the parameters at once"
        )
    # the rule stays with the method: it belongs together with feedback and outer rate
    if isinstance(override, Chain):
        combine = exchange.combine if isinstance(exchange, Gathered | Sharded) else None
        return dataclasses.replace(plan, exchange=gathered(override, combine))
    return dataclasses.replace(plan, exchange=summed(), residual=no_residual())


def fragments(entries: Sequence[Entry], number: int) -> list[tuple[Entry, ...]]:
    """Cut into `number` fragments by the blocks of the model, in turn: the b-th block goes to fragment b mod number.

    What belongs to no block (embeddings, head) joins the first fragment. A model without enough blocks is cut into
    consecutive parts of about equal size.

    >>> names = ["h.0.w", "h.1.w", "h.2.w", "h.3.w", "head"]
    >>> [[e.name for e in part] for part in fragments([Entry(name, (2, 2)) for name in names], 2)]
    [['h.0.w', 'h.2.w', 'head'], ['h.1.w', 'h.3.w']]
    """
    if number == 1:
        return [tuple(entries)]
    if len(entries) < number:
        raise ConfigError(
            f"{len(entries)} tensors do not divide into {number} fragments\n"
            f"hint: fragments={len(entries)} is the most that they give"
        )
    blocks = [_block(entry.name) for entry in entries]
    order = sorted({block for block in blocks if block is not None})
    if len(order) >= number:
        # by their place in the order, since layers without parameters leave gaps in the numbers
        places = [0 if block is None else order.index(block) % number for block in blocks]
    else:
        places = _even([entry.numel for entry in entries], number)
    return [tuple(entry for entry, at in zip(entries, places, strict=True) if at == place) for place in range(number)]


def _even(sizes: Sequence[int], number: int) -> list[int]:
    """Consecutive parts of about equal size, none of them empty: the part that each tensor goes to.

    >>> _even([240, 40, 40, 40, 4400, 110], 3)
    [0, 0, 0, 0, 1, 2]
    """
    total, before, place = max(sum(sizes), 1), 0, -1
    places = []
    for at, size in enumerate(sizes):
        middle = int((before + size / 2) * number / total)
        # one part further at most, and far enough for the tensors left to fill the parts left
        place = max(min(middle, place + 1), place, number - (len(sizes) - at))
        places.append(place)
        before += size
    return places


def _block(name: str) -> int | None:
    """The number of the block a parameter belongs to: the first whole number in its path."""
    found = re.search(r"(?:^|\.)(\d+)\.", name)
    return int(found.group(1)) if found else None
