"""All codecs, and those that are available on this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_omni_sched.config.errors import CodecMissingError
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.connectors.compression.audio import FlacCodec, MuLawCodec
from vllm_omni_sched.connectors.compression.codec import Codec, Kind
from vllm_omni_sched.connectors.compression.ids import IdsCodec
from vllm_omni_sched.connectors.compression.quantised import Fp8Codec, Int8Codec
from vllm_omni_sched.connectors.compression.shuffle import Lz4Codec, ZstdCodec

CODECS: tuple[type[Codec], ...] = (IdsCodec, Lz4Codec, ZstdCodec, FlacCodec, MuLawCodec, Int8Codec, Fp8Codec)
"""All codecs, in the order in which ties between them are broken: lossless ones first."""


@dataclass(frozen=True)
class Codecs:
    """Available codecs by name, and the reasons why others are absent."""

    present: Mapping[str, Codec]
    absent: Mapping[str, str]

    def get(self, name: str) -> Codec:
        """Return the codec of this name.

        Raises:
            CodecMissingError: there is none; the message tells how to get it.
        """
        if name in self.present:
            return self.present[name]
        if name in self.absent:
            raise CodecMissingError(
                f"codec {name!r} is not available: {self.absent[name]}; "
                f"{how_to_install('compression')}, or switch compression off where the data is sent"
            )
        known = ", ".join(self.present)
        raise CodecMissingError(f"codec {name!r} is unknown; known are {known}: do both sides run the same version?")

    def suited_to(self, kind: Kind, dtype: str, shape: tuple[int, ...]) -> list[Codec]:
        """Return the codecs worth trying on such a buffer."""
        return [codec for codec in self.present.values() if kind in codec.kinds and codec.suits(dtype, shape)]


def load_codecs() -> Codecs:
    """Load all codecs whose libraries are installed; imports them now, not in the middle of a transfer."""
    present, absent = {}, {}
    for factory in CODECS:
        try:
            codec = factory()
            present[codec.name] = codec
        except (ImportError, OSError) as error:
            absent[getattr(factory, "name", repr(factory))] = str(error)
    return Codecs(MappingProxyType(present), MappingProxyType(absent))
