"""`tests.models.tiny_training` without complete checkpoints: `python -m tests.models.stalled_training`."""

import asyncio

from orbax.checkpoint._src.path import atomicity

from tests.models.tiny_training import main


async def stall(*arguments: object) -> None:
    print("saving", flush=True)
    await asyncio.sleep(1000)


if __name__ == "__main__":
    atomicity.AtomicRenameTemporaryPath.finalize = stall
    main()
