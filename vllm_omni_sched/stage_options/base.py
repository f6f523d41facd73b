"""What all options of the stage scheduler have in common."""

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Strict and frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
