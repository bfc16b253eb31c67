"""Renderers of chat templates: `transformers` where it is installed, Jinja's sandbox elsewhere."""

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from models.data.sandbox import MOST_TEXT, Renderer, Rendering, limited, require_few, sandboxed

MODULE = "transformers.utils.chat_template_utils"

# Parameters of the renderer of `transformers`, and so no variables of a template.
PARAMETERS = ("conversations", "chat_template", "continue_final_message", "return_assistant_tokens_mask")


def has_transformers() -> bool:
    """Return whether `transformers` is installed."""
    return importlib.util.find_spec("transformers") is not None


def renderer(source: str) -> Renderer:
    """Compile a chat template."""
    return _of_transformers(source) if has_transformers() else sandboxed(source)


def _of_transformers(source: str) -> Renderer:
    module = importlib.import_module(MODULE)  # outside the limit of memory: it may import torch
    has_marks = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
    options = {"chat_template": source, "return_assistant_tokens_mask": has_marks}

    def render(variables: Mapping[str, Any]) -> Rendering:
        others = {name: value for name, value in variables.items() if name != "messages"}
        with limited("refuses the messages"):
            (text,), answers = module.render_jinja_template([variables["messages"]], **options, **others)
            require_few(len(text), MOST_TEXT)
        return Rendering(text, answers[0] if has_marks else [])

    with limited("is not valid"):
        # Compile the template without rendering it.
        module.render_jinja_template([[]], chat_template=f"{{% if false %}}{source}{{% endif %}}")
    return render
