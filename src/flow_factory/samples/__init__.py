"""The values that flow: latent states, times, trajectories, conditions, samples and their noise."""

from flow_factory.samples.media import (
    Audio,
    ConditionInputs,
    Media,
    MediaItem,
    Video,
    VideosWithSound,
    VideoWithSound,
)
from flow_factory.samples.noise import NoiseKey, Purpose, derive_seed, draw_normal, make_generator
from flow_factory.samples.sample import (
    BaseSample,
    Condition,
    I2AVSample,
    I2ISample,
    I2VSample,
    ImageSample,
    SampleBatch,
    T2AVSample,
    T2ISample,
    T2VSample,
    V2VSample,
    VideoSample,
    condition_fields,
)
from flow_factory.samples.states import ComponentTimes, LatentState, StepTimes
from flow_factory.samples.trajectory import Grid, Trajectory

__all__ = [
    "Audio",
    "BaseSample",
    "ComponentTimes",
    "Condition",
    "ConditionInputs",
    "Grid",
    "I2AVSample",
    "I2ISample",
    "I2VSample",
    "ImageSample",
    "LatentState",
    "Media",
    "MediaItem",
    "NoiseKey",
    "Purpose",
    "SampleBatch",
    "StepTimes",
    "T2AVSample",
    "T2ISample",
    "T2VSample",
    "Trajectory",
    "V2VSample",
    "Video",
    "VideoSample",
    "VideoWithSound",
    "VideosWithSound",
    "condition_fields",
    "derive_seed",
    "draw_normal",
    "make_generator",
]
