"""What a client of a pipeline may not ask for."""

from __future__ import annotations

from typing import Any

from dev.omni_cpu.asking import Ask, sampling_params
from dev.omni_cpu.spec import PipelineSpec

REFUSED = {"unknown": {"omni_class": "vip"}, "not allowed": {"omni_class": "realtime"}, "misspelt": {"omni_usr": "u"}}


async def refused(omni: Any, spec: PipelineSpec, prefix: str) -> dict[str, Any]:
    """`{"said": {case: what was said before an answer was begun}}`; no stage gets anything to do."""
    said = {}
    for name, extra in REFUSED.items():
        ask = Ask("What is asked in vain.", thinks=4, says=4)
        params = sampling_params(spec, ask)
        params[0].extra_args = extra
        try:
            answer = omni.generate(ask.prompt, request_id=f"{prefix}-{name}", sampling_params_list=params)
        except ValueError as error:
            said[name] = [type(error).__mro__[1].__name__, str(error)]
        else:
            await answer.aclose()
    return {"said": said}


REFUSED_SCENARIO = {"refused": refused}
