"""Exchange of the class of a live object of vLLM for a subclass with a mixin of ours.

vLLM's workers construct their model runner, and a runner its parts, inline: no factory of all platforms and versions
can be replaced. So the class is exchanged after construction, which works for every runner. Schedulers need none of
this, because vLLM lets their class be named.
"""

from typing import Any

from vllm_omni_sched.config.options import OmniSchedConfig


def mix_in(instance: Any, mixin: type, config: OmniSchedConfig) -> bool:
    """Make ``instance`` an instance of its class *and* ``mixin``; return False if it is one already.

    The mixin has no ``__init__``; its ``omni_prepare`` is called once on the instance.
    """
    cls = type(instance)
    if issubclass(cls, mixin):
        return False
    instance.__class__ = type(
        f"Omni{cls.__name__}", (mixin, cls), {"__module__": mixin.__module__, "__doc__": mixin.__doc__}
    )
    instance.omni_prepare(config)
    return True
