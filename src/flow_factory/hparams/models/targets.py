"""Names that linear layers have in many networks, for `ModelSpec.default_lora_targets`."""

from __future__ import annotations

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""Of one stream, or of the picture's where there are two."""

ADDED_ATTENTION = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Of the text's stream in joint attention."""

FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")
ADDED_FEED_FORWARD = ("ff_context.net.0.proj", "ff_context.net.2")

JOINT_BLOCK = ATTENTION + ADDED_ATTENTION + FEED_FORWARD + ADDED_FEED_FORWARD
"""Both streams' attention and MLPs."""
