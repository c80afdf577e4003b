from __future__ import annotations

import pytest

from lowtide.errors import ConfigError
from lowtide.transport.launcher import Launch, read_launch

OURS = {"LOWTIDE_RANK": "1", "LOWTIDE_WORLD_SIZE": "3", "LOWTIDE_ADDRESS": "host:29500"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29501"}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
        (TORCHRUN, Launch(0, 2, "::1", 29501, hosts=True)),
        ({**TORCHRUN, "RANK": "1"}, Launch(1, 2, "::1", 29501, hosts=False)),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, Launch(0, 2, "::1", 29501, hosts=False)),
        (OURS, Launch(1, 3, "host", 29500, hosts=False)),
        ({**OURS, "LOWTIDE_RANK": "0"}, Launch(0, 3, "host", 29500, hosts=True)),
        ({**OURS, **TORCHRUN}, Launch(1, 3, "host", 29500, hosts=False)),
        ({**OURS, "LOWTIDE_ADDRESS": "[fe80::1]:80"}, Launch(1, 3, "fe80::1", 80, hosts=False)),
    ],
    ids=["nothing", "half", "torchrun", "rank 1", "agent", "ours", "ours hosts", "ours win", "IPv6"],
)
def test_a_launch_is_read_from_the_environment(environ, launch):
    assert read_launch(environ) == launch


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"LOWTIDE_RANK": "0"}, "LOWTIDE_RANK set, but not LOWTIDE_WORLD_SIZE, LOWTIDE_ADDRESS"),
        ({**OURS, "LOWTIDE_RANK": "one"}, "LOWTIDE_RANK: 'one' is no whole number"),
        ({**OURS, "LOWTIDE_RANK": "3"}, "rank 3 of 3 cannot be"),
        ({**OURS, "LOWTIDE_RANK": "-1"}, "rank -1 of 3 cannot be"),
        ({**OURS, "LOWTIDE_ADDRESS": "host"}, "'host' is no host:port"),
        ({**OURS, "LOWTIDE_ADDRESS": "host:http"}, "LOWTIDE_ADDRESS: 'http' is no whole number"),
        ({**OURS, "LOWTIDE_ADDRESS": "host:70000"}, "port 70000 cannot be"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE: '' is no whole number"),
    ],
)
def test_a_broken_launch_is_refused_by_name(environ, words):
    with pytest.raises(ConfigError, match=words) as error:
        read_launch(environ)
    assert "hint: " in str(error.value)
