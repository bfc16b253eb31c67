"""`Parts` is what counts of bytes by name have in common."""

from dataclasses import asdict, dataclass, fields
from typing import TypeVar

Counted = TypeVar("Counted", bound="Parts")


@dataclass(frozen=True)
class Parts:
    """Parts are numbers, each with a name, that are summed up and added part by part."""

    @property
    def total(self) -> float:
        """Returns the bytes of all of them together."""
        return sum(asdict(self).values())

    def __add__(self: Counted, other: Counted) -> Counted:
        """Returns both, part by part."""
        return type(self)(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))
