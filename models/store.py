"""`Store` has what processes tell each other before any device is up, and `agree` compares their options there."""

import json
from typing import Any

# JAX has no public way to its key-value store; Orbax uses this one.
from jax._src import distributed

from models.place import Place
from models.refusal import Refused

AGREE_TIMEOUT_S = 600
"""So long processes may differ in the time that they take to read their data."""


class Store:
    """`Store` is the key-value store of JAX's coordination service; each key is written once."""

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client

    def put(self, key: str, value: str) -> None:
        """Writes a value, which all processes can read."""
        self._client.key_value_set(f"jax_moe_lb/{key}", value)

    def get(self, key: str, timeout_s: float) -> str:
        """Waits for a value.

        Raises:
            Refused: it did not come in time.
        """
        try:
            return self._client.blocking_key_value_get(f"jax_moe_lb/{key}", int(timeout_s * 1000))
        except RuntimeError as error:
            raise Refused(f"{key} of the processes did not come within {timeout_s} s: {error}") from error


def shared_number(place: Place, store: Store, key: str, number: int) -> int:
    """Returns the number of process 0 on all processes.

    Args:
        place: which process this is.
        store: what all processes can read.
        key: what the number is called there.
        number: that of this process.

    Raises:
        Refused: process 0 did not tell it in time.
    """
    if place.process_id == 0:
        store.put(key, str(number))
        return number
    return int(store.get(key, AGREE_TIMEOUT_S))


def agree(place: Place, store: Store, options: dict) -> None:
    """Returns if all processes have the same options, which is to be asked before they compute together.

    Args:
        place: which process this is.
        store: what all processes can read.
        options: names and values that JSON has; dictionaries may be in it.

    Raises:
        Refused: on all processes, with the same line.
    """
    store.put(f"options/{place.process_id}", json.dumps(_flat(options)))
    if place.process_id == 0:
        # Only one of them reads those of all, or thousands would read those of thousands.
        each = [json.loads(store.get(f"options/{i}", AGREE_TIMEOUT_S)) for i in range(place.num_processes)]
        store.put("difference", _difference(each))
    if difference := store.get("difference", AGREE_TIMEOUT_S):
        raise Refused(difference)


def _difference(each: list[dict]) -> str:
    """Says what differs, and who has which value; nothing if nothing does."""
    lines = []
    for name in dict.fromkeys(name for options in each for name in options):
        who: dict[str, list[int]] = {}
        for process, options in enumerate(each):
            who.setdefault(repr(options.get(name)), []).append(process)
        if len(who) > 1:
            lines.append(f"{name} is " + " and ".join(f"{value} on {_processes(ids)}" for value, ids in who.items()))
    return f"{'; '.join(lines)}; expected the same on all processes" if lines else ""


def _processes(ids: list[int]) -> str:
    return f"process{'es' * (len(ids) > 1)} {', '.join(map(str, ids))}"


def _flat(options: dict) -> dict:
    """Names what is in dictionaries by its own name, as the options of the command line are named."""
    flat: dict = {}
    for name, value in options.items():
        flat |= _flat(value) if isinstance(value, dict) else {name: value}
    return flat
