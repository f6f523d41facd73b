"""The pipelines: text → text, and text → text → sound, in async-chunk and in full-payload mode; and text → picture.

Two branch: in one, the thinker's output goes to two talkers, and what both say goes to a mixer; in the other, it goes
to a talker and to the stage that draws.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig

PROCESSORS = "dev.omni_cpu.processors"
PICTURES = "TinyPicturePipeline"

_THINKER = StagePipelineConfig(
    stage_id=0,
    model_stage="thinker",
    model_arch="TinyThinker",
    final_output=True,
    final_output_type="text",
    owns_tokenizer=True,
    engine_output_type="latent",  # anything but "text": its hidden states are wanted
    async_chunk_process_next_stage_input_func=f"{PROCESSORS}.thinker2talker_chunk",
    custom_process_next_stage_input_func=f"{PROCESSORS}.thinker2talker_payload",
)

TEXT_TO_TEXT = PipelineConfig(
    model_type="tiny_text_to_text",
    stages=(
        _THINKER,
        StagePipelineConfig(
            stage_id=1,
            model_stage="talker",
            model_arch="TinyTalker",
            input_sources=(0,),
            final_output=True,
            final_output_type="text",
            engine_output_type="text",
            sync_process_input_func=f"{PROCESSORS}.thinker2talker_prompt",
            requires_full_payload_input=True,
        ),
    ),
)

TEXT_TO_SOUND = PipelineConfig(
    model_type="tiny_text_to_sound",
    stages=(
        _THINKER,
        StagePipelineConfig(
            stage_id=1,
            model_stage="talker",
            model_arch="TinyTalker",
            input_sources=(0,),
            engine_output_type="latent",
            sync_process_input_func=f"{PROCESSORS}.thinker2talker_prompt",
            async_chunk_process_next_stage_input_func=f"{PROCESSORS}.talker2vocoder_chunk",
            custom_process_next_stage_input_func=f"{PROCESSORS}.talker2vocoder_payload",
            requires_full_payload_input=True,
        ),
        StagePipelineConfig(
            stage_id=2,
            model_stage="vocoder",
            model_arch="TinyVocoder",
            execution_type=StageExecutionType.LLM_GENERATION,
            input_sources=(1,),
            final_output=True,
            final_output_type="audio",
            engine_output_type="audio",
            sync_process_input_func=f"{PROCESSORS}.talker2vocoder_prompt",
            requires_full_payload_input=True,
        ),
    ),
)

_DRAWS = StagePipelineConfig(
    stage_id=1,
    model_stage="dit",
    model_arch=PICTURES,
    execution_type=StageExecutionType.DIFFUSION,
    input_sources=(0,),
    final_output=True,
    final_output_type="image",
    custom_process_input_func=f"{PROCESSORS}.encoder2dit_prompt",
    omni_kv_config={"need_recv_cache": False},
)

TEXT_TO_PICTURE = PipelineConfig(
    model_type="tiny_text_to_picture",
    stages=(
        StagePipelineConfig(
            stage_id=0,
            model_stage="encoder",
            model_arch="TinyThinker",
            owns_tokenizer=True,
            engine_output_type="text",
        ),
        _DRAWS,
    ),
)

BRANCHES = PipelineConfig(
    model_type="tiny_branches",
    stages=(
        _THINKER,
        StagePipelineConfig(
            stage_id=1,
            model_stage="talker",
            model_arch="TinyTalker",
            input_sources=(0,),
            engine_output_type="latent",
            sync_process_input_func=f"{PROCESSORS}.thinker2talker_prompt",
            async_chunk_process_next_stage_input_func=f"{PROCESSORS}.talker2vocoder_chunk",
            custom_process_next_stage_input_func=f"{PROCESSORS}.talker2vocoder_payload",
            requires_full_payload_input=True,
        ),
        StagePipelineConfig(
            stage_id=2,
            model_stage="echo",
            model_arch="TinyTalker",
            input_sources=(0,),
            final_output=True,
            final_output_type="text",
            engine_output_type="latent",
            sync_process_input_func=f"{PROCESSORS}.thinker2talker_prompt",
            async_chunk_process_next_stage_input_func=f"{PROCESSORS}.echo2mixer_chunk",
            custom_process_next_stage_input_func=f"{PROCESSORS}.echo2mixer_payload",
            requires_full_payload_input=True,
        ),
        StagePipelineConfig(
            stage_id=3,
            model_stage="mixer",
            model_arch="TinyMixer",
            execution_type=StageExecutionType.LLM_GENERATION,
            input_sources=(1, 2),
            final_output=True,
            final_output_type="audio",
            engine_output_type="audio",
            sync_process_input_func=f"{PROCESSORS}.talkers2mixer_prompt",
            requires_full_payload_input=True,
        ),
    ),
)

SPEECH_AND_PICTURE = PipelineConfig(
    model_type="tiny_speech_and_picture", stages=(*TEXT_TO_SOUND.stages, replace(_DRAWS, stage_id=3))
)

PIPELINES = {
    pipeline.model_type: pipeline
    for pipeline in (TEXT_TO_TEXT, TEXT_TO_SOUND, TEXT_TO_PICTURE, BRANCHES, SPEECH_AND_PICTURE)
}
