"""Federated dynamic averaging: agree when the replicas have spread, not when a clock says so."""

from __future__ import annotations

from lowtide.errors import unknown
from lowtide.sync.exchange import gate, summed
from lowtide.sync.merge import rebase, replace
from lowtide.sync.outer import COUNTER, Outer, adam, nesterov, sgd
from lowtide.sync.plan import Method, Plan
from lowtide.sync.signal import delta
from lowtide.sync.spread import estimator as named_estimator
from lowtide.sync.trigger import trigger
from lowtide.sync.when import every


def fda(
    *,
    theta: float | str = "calibrate:50",
    estimator: str = "linear",
    check_every: int = 1,
    delay: int = 0,
    min_interval: int = 1,
    max_interval: int | None = None,
    rate_power: float | None = None,
    server: str = "sgd",
) -> Method:
    """Every `check_every` steps each replica says how far it has drifted; over `theta`, all take the mean.

    `theta`: a bound on the spread; `calibrate:H` measures it after H steps; `interval:H` holds the mean interval at H;
    `budget:BYTES/STEPS` spends so many bytes over so many steps; `epochs:M`, with `check_every` an epoch, gives
    FDA-Opt's rounds of M/2 epochs on average. The bound follows the inner rate to the power `rate_power` (2 where it
    is fixed or calibrated).
    `estimator`: linear (8 bytes), norm (4), sketch (5004), max_norm, exact.
    `delay` lets the small message travel while training goes on. `server` is the step on the mean: sgd (take it),
    nesterov or adam. A fixed clock is often as good; this needs none, and bounds the spread.

    State: anchor, and with linear the last direction (2 P). Payload: 4 to 5004 bytes a check, 4 P bytes a round.

    >>> fda(theta="interval:30").plans[0].exchange.trigger.longest
    90
    """
    servers: dict[str, Outer] = {"sgd": sgd(1.0), "nesterov": nesterov(1.0, 0.3), "adam": adam()}
    if server not in servers:
        raise unknown("server", server, servers)
    bound = trigger(theta, shortest=min_interval, longest=max_interval, rate_power=rate_power, check_every=check_every)
    monitor = named_estimator(estimator)
    plan = Plan(
        when=every(check_every, delay=delay),
        signal=delta(),
        exchange=gate(monitor, bound, summed()),
        outer=servers[server],
        # the answer is mostly no, and when it is yes the steps taken meanwhile should count
        merge=rebase() if delay else replace(),
    )
    options = {
        "theta": theta, "estimator": estimator, "check_every": check_every, "delay": delay,
        "min_interval": min_interval,
        "max_interval": max_interval, "rate_power": rate_power, "server": server,
    }  # fmt: skip
    kept = [name for name in plan.outer.memory if name != COUNTER]
    state = ", ".join(["anchor", *(["direction"] if monitor.directed else []), *kept])
    return Method("fda", (plan,), options, "FDA (arXiv 2405.20988), FDA-Opt (arXiv 2505.04535)", state)


def bytes_paper(replicas: int, parameters: int, *, rounds: int, checks: int, estimator: str = "linear") -> float:
    """Bytes as the papers count them, over all replicas: models up and down a server, numbers up only.

        rounds * 2 K 4 d + checks * K S,   S = 4 (norm), 8 (linear), 5004 (sketch), 1/8 (max_norm)

    What really travels is in `stats()`.

    >>> bytes_paper(10, 61706, rounds=14, checks=3188)
    69365760.0
    """
    numbers = 4.0 * named_estimator(estimator).numbers(parameters)
    return replicas * (8.0 * parameters * rounds + (1 / 8 if estimator == "max_norm" else numbers) * checks)
