"""What can be set about a session beside its method."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import ConfigError, unknown

_ALONE = ("plain", "method")
_START = ("copy", "check")
BUFFERS = ("average", "rank0", "ignore")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time-outs, checks, and what happens alone and at the start.

    timeout      seconds after which a silent peer is given up
    check_every  rounds between two comparisons of fingerprints; 0 never, None about 1 % of the time
    alone        "plain": with one replica nothing is synchronised; "method": the method runs with itself
    start        "copy": all begin with rank 0's parameters and buffers; "check": refuse where they differ
    scale_last   scale the outer step of a last round that was cut short
    """

    timeout: float = 60.0
    check_every: int | None = None
    alone: str = "plain"
    start: str = "copy"
    scale_last: bool = False

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be positive, not {self.timeout!r}\nhint: it is in seconds; 60 is usual")
        if self.check_every is not None and self.check_every < 0:
            raise ConfigError(f"check_every must be at least 0, not {self.check_every}\nhint: 0 switches the check off")
        if self.alone not in _ALONE:
            raise unknown("value of alone", self.alone, _ALONE)
        if self.start not in _START:
            raise unknown("value of start", self.start, _START)
