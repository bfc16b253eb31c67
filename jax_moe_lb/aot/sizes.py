"""Sizes of a mixture-of-experts layer."""

import dataclasses
import re
from dataclasses import dataclass

LETTERS = {"H": "hidden", "F": "inner", "E": "experts", "T": "tokens", "K": "per_token"}
EXPECTED_SIZES = "some of H, F, E, T and K, such as H=2048,F=768,E=128,T=4096,K=8"
MOST = 2**31 - 1


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer; Qwen3-30B-A3B with 4096 tokens per rank by default.

    Args:
        hidden: Model width `H`; 2048 by default.
        inner: Inner width `F` of an expert; 768 by default.
        experts: Number of experts `E`; 128 by default.
        tokens: Tokens `T` per rank; 4096 by default.
        per_token: Experts `K` per token; 8 by default.

    Examples:
        >>> from jax_moe_lb.aot import LayerSizes
        >>> LayerSizes.parse("E=64,T=1024")
        LayerSizes(hidden=2048, inner=768, experts=64, tokens=1024, per_token=8)
    """

    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    tokens: int = 4096
    per_token: int = 8

    @classmethod
    def parse(cls, text: str) -> "LayerSizes":
        """Parse sizes from text; missing sizes keep their defaults.

        Args:
            text: Sizes such as `H=2048,F=768,E=128,T=4096,K=8`.

        Raises:
            ValueError: A letter is unknown or repeated, or a size is no integer of at least 1.
        """
        given: dict[str, int] = {}
        for part in text.split(","):
            found = re.fullmatch(r"([HFETK])=(0*[1-9]\d{0,9})", part.strip(), re.ASCII)
            if found is None or LETTERS[found[1]] in given or int(found[2]) > MOST:
                raise ValueError(f"sizes is {text[:100]!r}; expected {EXPECTED_SIZES}")
            given[LETTERS[found[1]]] = int(found[2])
        return dataclasses.replace(cls(), **given)

    @property
    def by_letter(self) -> dict[str, int]:
        """Sizes by letter."""
        return {letter: getattr(self, name) for letter, name in LETTERS.items()}

    @property
    def ideal_flops(self) -> int:
        """Floating-point operations of a rank in a forward pass: of the token copies and of the router."""
        copies = 3 * self.per_token * self.inner
        return 2 * self.tokens * self.hidden * (copies + self.experts)
