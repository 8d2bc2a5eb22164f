"""Inputs and outputs that several models share."""

from __future__ import annotations

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract

PROMPT = MediaSlot(Modality.TEXT, "prompt")
NEGATIVE_PROMPT = MediaSlot(Modality.TEXT, "negative_prompt", required=False)

TEXT_TO_IMAGE = PipelineIOContract(inputs=(PROMPT, NEGATIVE_PROMPT), outputs=(Modality.IMAGE,))

REFERENCES = MediaSlot(Modality.IMAGE, "image", required=False, max_items=None)
EDITED_IMAGE = MediaSlot(Modality.IMAGE, "image")
