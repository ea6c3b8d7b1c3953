"""Sizes and rates written with their unit: `45GB`, `44GiB`, `25GB/s`. GB is 10^9 bytes, GiB 2^30."""

import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

UNITS = {
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}


@dataclass(frozen=True)
class Quantity:
    """The type of a key that counts bytes, or bytes `per` something; the value is a whole number of bytes.

    A plain number counts bytes. `words` say in a message what is wanted.
    """

    words: str
    per: str = ""

    def parse(self, value: Any) -> Any:
        """Return the bytes that `value` means; raises ValueError, which pydantic turns into its own."""
        if isinstance(value, str):
            found = re.fullmatch(r"([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([KMGT]?i?B)(/\w+)?", value.strip())
            if found is None or found[2] not in UNITS or (found[3] or "") != self.per:
                raise ValueError(f"is not {self.words}")
            value = float(found[1]) * UNITS[found[2]]
        return int(value) if isinstance(value, float) else value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make pydantic read a field of this type through `parse`."""
        return core_schema.no_info_before_validator_function(self.parse, handler(source))


SIZE = Quantity("a size above 0, such as 45GB or 44GiB,")
RATE = Quantity("a rate above 0, such as 25GB/s,", per="/s")
