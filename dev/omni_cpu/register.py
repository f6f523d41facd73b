"""`register()`, the entry point in `vllm.general_plugins`: models and pipelines."""

from __future__ import annotations


def register() -> None:
    """Register models and pipelines; called once in each process of vLLM-Omni, sometimes twice."""
    from vllm.model_executor.models import ModelRegistry
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline
    from vllm_omni.diffusion.registry import DiffusionModelRegistry, register_diffusion_model
    from vllm_omni.model_executor.models import OmniModelRegistry

    from dev.omni_cpu.models import Mixer, Talker, Thinker, Vocoder
    from dev.omni_cpu.pipelines import PICTURES, PIPELINES

    # Classes, not their dotted names: those vLLM would inspect in a process of their own each. In both registries: one
    # is asked when the engine's arguments are checked, the other when the model is loaded.
    models = {"TinyThinker": Thinker, "TinyTalker": Talker, "TinyVocoder": Vocoder, "TinyMixer": Mixer}
    for name, model in models.items():
        for registry in (ModelRegistry, OmniModelRegistry):
            if name not in registry.get_supported_archs():
                registry.register_model(name, model)
    if PICTURES not in DiffusionModelRegistry.get_supported_archs():
        module, pictures = "dev.omni_cpu.pictures", "PicturePipeline"
        register_diffusion_model(PICTURES, module, pictures, post_process_func_name="to_pictures")
    for name, pipeline in PIPELINES.items():
        if name not in OMNI_PIPELINES:
            register_pipeline(pipeline)
