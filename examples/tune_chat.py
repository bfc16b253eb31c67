"""Teach a tiny model an instruction format from 500 conversations, in a minute on a CPU.

python examples/tune_chat.py
"""

import json
import random
import tempfile
from pathlib import Path

from jax_moe_lb import exact, use_virtual_cpu_devices
from models.config import BatchConfig, OptimizerConfig, ParallelConfig, TrainConfig
from models.data.chat import ChatTemplate
from models.data.sources import corpus_from
from models.data.tokenizers import TokenizerFile
from models.finetune import make_tuning, tune
from models.mesh import make_mesh
from models.pretrained.generation import generate
from models.pretrained.loading import from_pretrained
from models.pretrained.saving import save_pretrained
from models.run_folder.metrics import CountsTrace
from models.tiny_checkpoint import byte_tokenizer, write_tiny

TEMPLATE = """{% for message in messages %}{{ message.role[0] + ': ' + message.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'a: ' }}{% endif %}"""
LEGS = {"cat": 4, "owl": 2, "trout": 0, "spider": 8, "beetle": 6, "frog": 4, "whale": 0, "hen": 2}
ASKED = ("How many legs has a {}?", "Legs of a {}?", "Count the legs of a {}.")


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
    parallel, batch, optimizer = ParallelConfig(expert_parallel=4), BatchConfig(8, 96), OptimizerConfig(5e-3)
    config = TrainConfig(parallel=parallel, batch=batch, optimizer=optimizer, steps=150)
    mesh, chat = make_mesh(parallel), ChatTemplate(base)
    corpus = corpus_from([data], TokenizerFile(base / "tokenizer.json"), chat=chat)
    tuning = make_tuning(from_pretrained(base, mesh, exact(), scan_layers=True), config, mesh)
    tuned = tuning.model(tune(tuning, corpus, config, mesh, CountsTrace()))
    save_pretrained(tuned, folder / "tuned", keep_from=base)
    for question in (ASKED[0].format("spider"), ASKED[2].format("owl")):
        (answer,) = generate(tuned, [chat.question(question)], 48, end_tokens=[end])
        print(question, "->", byte_tokenizer().decode(answer))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
