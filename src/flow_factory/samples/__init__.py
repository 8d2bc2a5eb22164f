"""The values that flow: latent states, times, trajectories, conditions, samples and their noise."""

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
)
from flow_factory.samples.states import ComponentTimes, LatentState, StepTimes
from flow_factory.samples.trajectory import Grid, Trajectory

__all__ = [
    "BaseSample",
    "ComponentTimes",
    "Condition",
    "Grid",
    "I2AVSample",
    "I2ISample",
    "I2VSample",
    "ImageSample",
    "LatentState",
    "NoiseKey",
    "Purpose",
    "SampleBatch",
    "StepTimes",
    "T2AVSample",
    "T2ISample",
    "T2VSample",
    "Trajectory",
    "V2VSample",
    "VideoSample",
    "derive_seed",
    "draw_normal",
    "make_generator",
]
