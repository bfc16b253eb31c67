"""Fields of pydantic models for quantities with units."""

from typing import Annotated

from pydantic import BeforeValidator

from jax_moe_lb.core.quantities import rate, size, speed, time

SizeField = Annotated[float, BeforeValidator(size)]
RateField = Annotated[float, BeforeValidator(rate)]
TimeField = Annotated[float, BeforeValidator(time)]
SpeedField = Annotated[float, BeforeValidator(speed)]
