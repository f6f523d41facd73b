"""Models small enough for a CPU, written from nothing: no hub, no download.

    write_llava(Path(".models/llava"))                           images, through vLLM's LLaVA
    write_llava(Path(".models/llava-slow-tower"), **SLOW_TOWER)  the same, encoding an image takes 0.2 to 0.4 s
    write_qwen2_vl(Path(".models/qwen2-vl"))                     video and images, through vLLM's Qwen2-VL
    write_qwen2_5_vl(Path(".models/qwen2.5-vl"))                 the same, through Qwen2.5-VL, which can prune videos
    write_qwen3_vl(Path(".models/qwen3-vl"))                     the same, through Qwen3-VL
    write_voxtral_realtime(Path(".models/voxtral-realtime"))     a realtime transcription session
    write_qwen2_audio(Path(".models/qwen2-audio"))               clips of sound, through vLLM's Qwen2-Audio
    write_llama(Path(".models/llama"))                           text alone
    write_eagle(Path(".models/eagle"))                           a draft for the LLaVA, which reads images, too
    write_lora(Path(".models/lora"))                             an adapter for the LLaVA's language model

All return the folder, and leave a folder that is up to date alone.
"""

from dev.tiny_models.eagle import write_eagle
from dev.tiny_models.llama import write_llama
from dev.tiny_models.llava import SLOW_TOWER, write_llava
from dev.tiny_models.lora import write_lora
from dev.tiny_models.qwen2_5_vl import write_qwen2_5_vl
from dev.tiny_models.qwen2_audio import write_qwen2_audio
from dev.tiny_models.qwen2_vl import write_qwen2_vl
from dev.tiny_models.qwen3_vl import write_qwen3_vl
from dev.tiny_models.voxtral import write_voxtral_realtime

__all__ = [
    "SLOW_TOWER",
    "write_eagle",
    "write_llama",
    "write_llava",
    "write_lora",
    "write_qwen2_5_vl",
    "write_qwen2_audio",
    "write_qwen2_vl",
    "write_qwen3_vl",
    "write_voxtral_realtime",
]
