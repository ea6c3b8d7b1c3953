"""What every group of keys of the configuration has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)
