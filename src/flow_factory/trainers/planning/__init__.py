"""What a run will need, before it is started: parameters, memory, and rows that go through the network."""

from flow_factory.trainers.planning.plan import plan_run
from flow_factory.trainers.planning.report import RunPlan

__all__ = ["RunPlan", "plan_run"]
