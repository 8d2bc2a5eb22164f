"""A pipeline for models that diffusers has none of: the seam at which a network from elsewhere comes in."""

from __future__ import annotations

from typing import Any, NoReturn

from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from flow_factory.errors import InputError


class PseudoPipeline(DiffusionPipeline):
    """Components under their names, saved and loaded as those of a diffusers pipeline are, and no sampler.

    Adapters, `check`, `plan`, LoRA, exports and checkpoints need of a pipeline its components and its folder; sampling
    is the toolkit's own rollout. So a model from elsewhere (one network that reads text and draws pictures, such as
    BAGEL or SenseNova-U1) takes part once its parts are components:

    * each network is a `diffusers.ModelMixin` with a `ConfigMixin` (`PeftAdapterMixin` as well, to load LoRA files),
      or a `transformers` model, whose class can be imported by the name of its module;
    * `scheduler` is a diffusers scheduler, whose grid is the model's;
    * a subclass names them as arguments of `__init__` and registers them, as every pipeline does.

    The published weights are converted once, by building the subclass and `save_pretrained(folder)`; that folder is
    `model.model_name_or_path`. `ModelSpec.pipeline_class` is the subclass's name, and the adapter's `load_pipeline`
    returns `self.load_diffusers(TheSubclass)`. A subclass may have a `__call__`, the authors' own sampler for example,
    and then tests/parity compares the adapter with it.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always raises.

        Raises:
            InputError: There is no sampler here.
        """
        raise InputError(
            f"{type(self).__name__} holds the parts of a model that diffusers has no pipeline for, and cannot sample "
            f"by itself. Use `flow-factory sample`."
        )
