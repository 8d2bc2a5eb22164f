"""What the numbers of a run are called on the page, and in which order they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cycle", "update"]

# Sections of the page: id, title, what they are about.
SECTIONS: tuple[tuple[str, str, str], ...] = (
    (
        "reward",
        "Reward",
        "What the policy is trained on: scores of the samples of each cycle's rollout, before its updates.",
    ),
    (
        "evaluation",
        "Evaluation",
        "Held-out prompts with the same noise at every evaluation: what training is for. Every prompt counts once.",
    ),
    ("policy", "Policy", "How far an update moves the policy from the one that made the samples, and from the start."),
    ("optimisation", "Optimisation", "Loss, gradients and step size of every optimizer step."),
    (
        "monitors",
        "Monitors for reward hacking",
        "Statistics of the samples that no reward asked to change. A reward that climbs while one of them runs away "
        "may be cheated: look at the samples.",
    ),
    ("time", "Time", "Where the wall clock goes."),
    ("other", "Other numbers", "Everything else that the run logged."),
)


@dataclass(frozen=True)
class Quantity:
    """A metric that the page knows.

    Attributes:
        kind: Rows that hold it.
        key: Its name there; in "update" rows behind the role.
        section: Where it is shown.
        title: What it is called.
        about: A sentence for readers who do not know it.
    """

    kind: Kind
    key: str
    section: str
    title: str
    about: str = ""


KNOWN: tuple[Quantity, ...] = (
    Quantity(
        "cycle",
        "reward/group_std",
        "reward",
        "Spread within a group",
        "Standard deviation of the reward among the samples of one prompt, mean over prompts. What is compared with "
        "each other lives here: at zero nothing can be learned.",
    ),
    Quantity(
        "cycle",
        "reward/zero_std_ratio",
        "reward",
        "Groups without spread",
        "Share of prompts whose samples all got the same reward; they teach nothing.",
    ),
    Quantity(
        "cycle", "reward/failed_ratio", "reward", "Failed scores", "Share of samples that a reward could not score."
    ),
    Quantity("cycle", "advantage/abs_mean", "reward", "Size of the advantages", "Mean absolute advantage."),
    Quantity(
        "update",
        "kl",
        "policy",
        "KL to the reference",
        "Divergence of the policy from the reference policy (train.kl_type), on the trained steps.",
    ),
    Quantity(
        "update",
        "approx_kl",
        "policy",
        "KL to the rollout policy",
        "Estimate, from the log-ratios, of how far the updates of a cycle have moved from the policy that sampled. "
        "Zero at the first update of a cycle.",
    ),
    Quantity(
        "update",
        "clip_fraction",
        "policy",
        "Clip fraction",
        "Share of the ratios outside train.clip_range, whose gradient is cut off.",
    ),
    Quantity(
        "update",
        "ratio_deviation_max",
        "policy",
        "Largest ratio deviation",
        "Largest distance of a policy ratio from 1 in the update.",
    ),
    Quantity("update", "ratio_mean", "policy", "Mean ratio", "Mean policy ratio of the update."),
    Quantity(
        "cycle",
        "first_update/ratio_deviation_max",
        "policy",
        "Ratio deviation of the first update",
        "Before the first update of a cycle the policy is the one that sampled, so this is 0 in float32; in lower "
        "precision it is the rounding that the clip acts on.",
    ),
    Quantity(
        "cycle",
        "first_update/param_change_norm",
        "policy",
        "Parameter change of the first update",
        "Euclidean norm of what the first update of the cycle changed in the trained parameters. At zero the policy "
        "does not move.",
    ),
    Quantity("cycle", "loss", "optimisation", "Loss per cycle", "Mean over the cycle's updates."),
    Quantity("update", "loss", "optimisation", "Loss per update", ""),
    Quantity("update", "policy_loss", "optimisation", "Policy loss", "The part of the loss without penalties."),
    Quantity(
        "update", "grad_norm", "optimisation", "Gradient norm", "Euclidean norm before clipping to train.max_grad_norm."
    ),
    Quantity("update", "learning_rate", "optimisation", "Learning rate", ""),
    Quantity("cycle", "network_rows", "time", "Network rows", "Rows that went through the trained components."),
    Quantity("cycle", "trained_rows", "time", "Trained rows", "Those of them with gradients."),
)

# Left out where the update rows show the same with more detail.
COVERED_BY_UPDATES = {
    "first_update/grad_norm": "grad_norm",
    "first_update/clip_fraction": "clip_fraction",
    "first_update/kl": "kl",
}
# Rows of these kinds are shown elsewhere on the page, or not as curves.
NOT_CURVES = ("alarm", "monitor_band", "eval_monitor")


def readable(key: str) -> str:
    """A title for a metric nobody described: `reward/ocr/mean` as "reward, ocr, mean"."""
    words = [part.replace("_", " ").strip() for part in key.split("/")]
    text = ", ".join(word for word in words if word)
    return text[:1].upper() + text[1:]
