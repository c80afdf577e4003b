"""What a launcher left in the environment: which rank this is, of how many, and where to meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.errors import ConfigError

OURS = ("LOWTIDE_RANK", "LOWTIDE_WORLD_SIZE", "LOWTIDE_ADDRESS")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """One process of a launch; `hosts` says whether it opens the meeting point itself."""

    rank: int
    size: int
    host: str
    port: int
    hosts: bool


def read_launch(environ: Mapping[str, str]) -> Launch | None:
    """The launch described by our variables or by torchrun's, or None; ours win, and must be complete.

    >>> read_launch({"LOWTIDE_RANK": "1", "LOWTIDE_WORLD_SIZE": "2", "LOWTIDE_ADDRESS": "10.0.0.7:29500"})
    Launch(rank=1, size=2, host='10.0.0.7', port=29500, hosts=False)
    """
    # Ours win: the launcher of lowtide leaves torchrun's alone, so that other libraries stay out of it.
    ours = [name for name in OURS if name in environ]
    if ours:
        missing = [name for name in OURS if name not in environ]
        if missing:
            raise ConfigError(f"{', '.join(ours)} set, but not {', '.join(missing)}\nhint: set all three or none")
        host, _, port = environ["LOWTIDE_ADDRESS"].rpartition(":")
        if not host:
            raise ConfigError(f"LOWTIDE_ADDRESS={environ['LOWTIDE_ADDRESS']!r} is no host:port\nhint: 10.0.0.7:29500")
        rank, size = _number(environ, "LOWTIDE_RANK"), _number(environ, "LOWTIDE_WORLD_SIZE")
        return _checked(Launch(rank, size, host.strip("[]"), _whole("LOWTIDE_ADDRESS", port), rank == 0))
    # Half of torchrun's is no launch: RANK alone is a common name that others set, too.
    if any(name not in environ for name in _TORCHRUN):
        return None
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    # Under torchrun the agent may hold the meeting point already.
    hosts = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return _checked(Launch(rank, size, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"), hosts))


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.rank < launch.size:
        raise ConfigError(
            f"rank {launch.rank} of {launch.size} cannot be\nhint: ranks count from 0 to one below the world size"
        )
    if not 0 < launch.port < 65536:
        raise ConfigError(f"port {launch.port} cannot be\nhint: choose one from 1024 to 65535")
    return launch


def _number(environ: Mapping[str, str], name: str) -> int:
    return _whole(name, environ[name])


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is no whole number\nhint: it is set by the launcher") from None
