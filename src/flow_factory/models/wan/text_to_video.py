"""Wan text to video (`wan2_t2v`)."""

from __future__ import annotations

from diffusers.pipelines.wan.pipeline_wan import WanPipeline

from flow_factory.models.wan.base import WanAdapter


class WanTextToVideoAdapter(WanAdapter):
    """Wan 2.1 T2V, Wan 2.2 TI2V 5B from text alone, Wan 2.2 T2V A14B."""

    def load_pipeline(self) -> WanPipeline:
        return self.load_diffusers(WanPipeline)
