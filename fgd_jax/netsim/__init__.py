"""Network and failure simulator: what share of the time do workers compute, for a method, a link and a failure rate?

    python -m fgd_jax.netsim utilization --method=GlobalM1LocalM2 --params=1.498e9 --bandwidth=100Mbps --step-seconds=2.35
    python -m fgd_jax.netsim table fgd | table streaming --size=1B | table goodput | table failures
    python -m fgd_jax.netsim goodput --learners=8 --chips=1200000
    python -m fgd_jax.netsim recommend --bandwidth=1Gbps --params=1.5e9 --step-seconds=2

plan.py says what a method sends and when; rounds.py plays it out as events, closed.py has formulas beside it; layers.py is
the per-layer model of one data centre's step; goodput.py simulates millions of chips that fail; recommend.py multiplies
simulated rounds with measured losses. Nothing here needs a device.
"""

from fgd_jax.netsim.closed import utilization as closed_form
from fgd_jax.netsim.failures import Drops, Interruptions, StepTimes, parse_step_times
from fgd_jax.netsim.links import Links, cost, parse_bandwidth, read_links
from fgd_jax.netsim.plan import Exchange, Plan, make_plan, plan_of_config, plan_of_method
from fgd_jax.netsim.rounds import Failure, Result, simulate

__all__ = ["Drops", "Exchange", "Failure", "Interruptions", "Links", "Plan", "Result", "StepTimes", "closed_form",
           "cost", "make_plan", "parse_bandwidth", "parse_step_times", "plan_of_config", "plan_of_method", "read_links",
           "simulate"]
