"""Both renderers of chat templates."""

import pytest

from models.data import renderers
from models.data.chat import ChatTemplate

RENDERERS = ("sandbox", "transformers")


def chat_template(folder, by):
    """Return the template of a checkpoint with a given renderer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renderers, "has_transformers", lambda: by == "transformers")
        return ChatTemplate(folder)
