"""Teach a tiny model an instruction format from 500 conversations, in a minute on a CPU.

python examples/tune_chat.py
"""

import json
import random
import tempfile
from pathlib import Path

from jax_moe_lb import exact, use_virtual_cpu_devices
from models.config import ParallelConfig
from models.data.chat import ChatTemplate
from models.data.tokenizers import decoded, end_tokens
from models.mesh import make_mesh
from models.pretrained.generation import Generator
from models.pretrained.loading import from_pretrained
from models.tiny_checkpoint import byte_tokenizer, write_tiny
from models.train import app

TEMPLATE = """{% for message in messages %}{{ message.role[0] + ': ' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'a: ' }}{% endif %}"""
LEGS = {"cat": 4, "owl": 2, "trout": 0, "spider": 8, "beetle": 6, "frog": 4, "whale": 0, "hen": 2}
ASKED = ("How many legs has a {}?", "Legs of a {}?", "Count the legs of a {}.")
VALUES = ("batch.sequence_length=128", "optimizer.learning_rate=5e-3", "validation.interval=50")


def conversation(draw):
    animal, question = draw.choice(list(LEGS)), draw.choice(ASKED)
    answer = json.dumps({"animal": animal, "legs": LEGS[animal]})
    return {
        "messages": [{"role": "user", "content": question.format(animal)}, {"role": "assistant", "content": answer}]
    }


def main(folder):
    use_virtual_cpu_devices(4)
    base, data, draw = folder / "base", folder / "talks.jsonl", random.Random(0)
    data.write_text("\n".join(json.dumps(conversation(draw)) for _ in range(500)))
    write_tiny("qwen3_moe", base)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    (end,) = byte_tokenizer().encode("\n").ids
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    options = ["--data", data, "--run-dir", folder / "run", "--mesh", "expert=4", "--steps", 150]
    options += [part for value in VALUES for part in ("--set", value)]
    app([str(option) for option in [base, *options]], standalone_mode=False)
    tuned = folder / "run" / "model"
    model = from_pretrained(tuned, make_mesh(ParallelConfig(expert_parallel=4)), exact())
    generate, chat = Generator(model), ChatTemplate(tuned)
    for question in (ASKED[0].format("spider"), ASKED[2].format("owl")):
        (answer,) = generate([chat.prompt([{"role": "user", "content": question}])], 48, end_tokens=end_tokens(tuned))
        print(question, "->", decoded(chat.tokenizer, answer))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
