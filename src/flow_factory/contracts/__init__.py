"""What a trainer acquires, what feedback it needs, and what media a model takes and gives. Importable without torch."""

from flow_factory.contracts.execution import (
    OFFLINE_EXECUTION_CONTRACT,
    ONLINE_EXECUTION_CONTRACT,
    ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT,
    Acquisition,
    ExecutionContract,
    Feedback,
)
from flow_factory.contracts.media import MediaSlot, Modality, PipelineIOContract, SoundFormat

__all__ = [
    "OFFLINE_EXECUTION_CONTRACT",
    "ONLINE_EXECUTION_CONTRACT",
    "ONLINE_NO_FEEDBACK_EXECUTION_CONTRACT",
    "Acquisition",
    "ExecutionContract",
    "Feedback",
    "MediaSlot",
    "Modality",
    "PipelineIOContract",
    "SoundFormat",
]
