import dataclasses
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from jax_moe_lb.layer.systems import COMPARED, system_names
from models import generate
from models.config import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from models.mesh import make_mesh, memory_bytes
from models.train import app
from tests.models.small import CORPUS, programs_of, refusal

STAGES = ["--mesh", "expert=4,stage=2", "--set"]
SHARDS = "batch.size is 32; expected a multiple of the 4 shards,"
CASES = [
    (["huge"], "config is 'huge'; expected one of "),
    (["huge.yaml"], "config is 'huge.yaml'; expected a readable file"),
    (["--system", "foo"], "system is 'foo'; expected one of "),
    (["--system", "exact:headroom=0"], "parallel.headroom is 0.0; expected"),
    (["--set", "parallel.headroom=-1"], "parallel.headroom is -1.0; expected"),
    (["--system", "exact:replica_slots=-2"], "parallel.replica_slots is -2; expected"),
    (["--system", "plain:replica_slots=2"], "parallel.replica_slots is 2; expected none"),
    (["--set", "batch.size=12"], "batch.size is 12; expected a multiple of the 8 shards"),
    (["--steps", "0"], "steps is 0; expected at least 1"),
    (["--set", "optimizer.learning_rate=nan"], "optimizer.learning_rate is nan; expected"),
    (["--seed", "-1"], "seed is -1; expected"),
    (["--mesh", "expert=16"], "data_parallel x expert_parallel is 1 x 16; expected"),
    (["--mesh", "expert=2,expert=1"], "--mesh expert=2,expert=1: expert is given twice; expected it once"),
    (["--mesh", "expert=5", "--set", "batch.size=30"], "num_experts is 16; expected"),
    (["--mesh", "expert=4,stage=2"], "parallel.stages is 2; expected 1 without model.checkpoint"),
    (["--mesh", "expert=8,domain=3"], "parallel.ranks_per_domain is 3; expected a divisor"),
    (["--data", ""], "data is ''; expected a file or folder"),
    (["--set", "data.validation="], "data.validation is ''; expected a string that is not empty"),
    (["small", "--set", "model.checkpoint=other"], "model.checkpoint is 'other'; expected none beside CONFIG 'small'"),
    (["--set", "lora.alpha=3"], "lora.alpha is 3.0 with rank 0; expected 16.0. Set lora.rank"),
    (["--data", "short", "--set", "data.validation=./short"], "data.validation is './short'; expected held-out files"),
    (["--set", "batch.size=1099511627776"], "batch.size is 1099511627776; expected at most 8388607 sequences of 128"),
    (["--data", "missing"], "data is 'missing', which does not exist; expected"),
    (["--data", "short:0"], "data is 'short' with weight 0; expected a finite number above 0"),
    (["--data", "short", "--set", "data.tokenizer=empty"], "empty is not a tokenizer"),
    (["--set", "data.tokenizer=tokens"], "tokens cannot be read"),
    (["--data", "short", "--set", "model.vocab_size=100"], "vocab_size is 100; expected at least the 256"),
    (["--set", "optimizer.schedule=step"], "optimizer.schedule is 'step'; expected one of cosine"),
    (["--set", "batch.accumulate=3"], "batch.size is 32; expected a multiple of the 8 shards"),
    (["--set", "model.remat=all"], "model.remat is 'all'; expected none, full, or"),
    (["--set", "relocation.min_gain=1"], "relocation.min_gain is 1.0; expected at least 0"),
    (["--set", "relocation.min_gain=0.1"], "relocation.min_gain is 0.1; expected 0.02 without relocation. Set"),
    (["--logger", "wandb=a", "--logger", "wandb=b"], "logger is 'wandb=b'; expected one project of wandb"),
    (["--set", "model.z_loss=-1"], "model.z_loss is -1.0; expected a finite number"),
    (["--set", "parallel.repeats=2"], "parallel.repeats is 2; expected 1 without a pipeline. Set stages"),
    (["--set", "parallel.layers_before=2"], "layers_before is 2; expected 0 without a pipeline"),
    ([*STAGES, "parallel.microbatches=1"], "microbatches is 1; expected a multiple of stages 2"),
    ([*STAGES, "parallel.microbatches=0"], "microbatches is 0; expected a multiple of stages 2"),
    ([*STAGES, "parallel.microbatches=6"], f"{SHARDS} data_parallel 1 x expert_parallel 4 x microbatches 6"),
    (["--set", "parallel.dispatch=twice"], "parallel.dispatch is 'twice'; expected one of direct, once"),
    (["--system", "feplb+once"], "dispatch is 'once'; expected none for a system with TwoPhase"),
    (["--set", "lora.rank=4"], "lora.rank is 4; expected 0 without model.checkpoint"),
    (["--set", "model.further_weight=0.3"], "further_weight is 0.3; expected 0.0 without a checkpoint"),
    (["--set", "multi_process.stall_timeout_s=9"], "stall_timeout_s is 9.0; expected a finite"),
    (["--set", "multi_process.stall_timeout_s=nan"], "stall_timeout_s is nan; expected a finite"),
    (["--data", "empty"], "data is 'empty', which contains no bytes; expected"),
    (["--data", "short"], "expected more than sequence_length 128"),
    (["--resume"], "resume is set, but 'run' has no checkpoint; expected"),
    (["--run-dir", "short/run"], "run_dir is 'short/run'; expected a writable folder"),
    (["--logger", "mlflow"], "logger is 'mlflow'; expected tensorboard or wandb=PROJECT"),
    (["--set", "modle.embed_dim=8"], "--set modle.embed_dim=8: key is 'modle.embed_dim'; expected model.embed_dim"),
    (["--set", "model.hidden=8"], "--set model.hidden=8: key is 'model.hidden'; expected one of model.num_layers, "),
    (["--set", "model.num_layer=8"], "key is 'model.num_layer'; expected model.num_layers"),
    (["--set", "learning_rate=1"], "key is 'learning_rate'; expected optimizer.learning_rate"),
    (["--set", "zzz.qqq=1"], "key is 'zzz.qqq'; expected section.key=value; --set list prints all keys"),
    (["--set", "batch.size"], "--set batch.size: key is 'batch.size'; expected batch.size=VALUE"),
    (["--set", "steps=5"], "--set steps=5: key is 'steps'; expected the option --steps"),
    (["--set", "batch.size=1.5"], "batch.size=1.5: batch.size is '1.5'; expected an integer"),
    (["--set", "model.z_loss=none"], "model.z_loss is 'none'; expected a number"),
    (["--set", "data.within_documents=1"], "data.within_documents is '1'; expected true or false"),
    (["--set", "relocation.interval=x"], "relocation.interval is 'x'; expected an integer or none"),
    (["--system", "exact:slots=2"], "system is 'exact:slots=2' with option 'slots'; expected"),
    (["--system", "exact:headroom=x"], "headroom is 'x'; expected a number or none"),
    (
        ["--mesh", "tensor=2"],
        "--mesh tensor=2: key is 'tensor'; expected KEY=VALUE, a key of data, expert, domain, stage",
    ),
    (["--mesh", "expert=4", "--set", "parallel.expert_parallel=8"], "parallel.expert_parallel is given by two"),
    (["wrong_key.yaml"], "config 'wrong_key.yaml': key is 'batch.sizes'; expected one of batch.size"),
    (["wrong_value.yaml"], "config 'wrong_value.yaml': batch.size is 1.5; expected an integer"),
    (["wrong_section.yaml"], "config 'wrong_section.yaml': batch is 3; expected a mapping of keys"),
    (["none.yaml"], "config 'none.yaml' is not valid YAML: line 1"),
    (["range.yaml"], "batch.size is 12; expected a multiple of the 8 shards"),
]

COUNTS = [
    f"{section.name}.{key}"
    for section in dataclasses.fields(TrainConfig)
    for key, hint in getattr(section.type, "__annotations__", {}).items()
    if "Least(bound=1.0," in repr(hint)
]
CASES += [
    (["--set", f"{key}={value}"], f"{key} is {value}; expected at least 1") for key in COUNTS for value in (0, -4)
]

FILES = {
    "empty": "",
    "short": "too short",
    "wrong_key.yaml": "batch: {sizes: 8}",
    "wrong_value.yaml": "batch: {size: 1.5}",
    "wrong_section.yaml": "batch: 3",
    "none.yaml": "batch: [",
    "range.yaml": "batch: {size: 12}",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=[message for _, message in CASES])
def test_one_line_and_exit_code(folder, arguments, message):
    assert message in refusal(app, "--run-dir", "run", *arguments)
    assert not (folder / "run").exists()


def test_a_file_says_what_options_say(folder, monkeypatch):
    """Options override the file."""
    configs = []
    monkeypatch.setattr("models.train.prepare", lambda config, *rest, **options: configs.append(config) or exit(0))
    monkeypatch.setattr("models.train.default_corpus", lambda max_bytes: CORPUS)
    (folder / "run.yaml").write_text(
        "steps: 7\nmodel: {num_layers: 2, remat: full}\nparallel: {system: plain, ranks_per_domain: null}\n"
        "optimizer: {learning_rate: 1e-3, weight_decay: 0}\n"
    )
    options = ["--system", "greedy:replica_slots=3", "--mesh", "data=2,expert=4", "--set", "batch.size=16"]
    CliRunner().invoke(app, ["run.yaml", *options, "--seed", "5", "--set", "model.num_layers=3"])
    keys = ["model.remat=full", "optimizer.learning_rate=1e-3", "optimizer.weight_decay=0", "model.num_layers=3"]
    options += [word for key in keys for word in ("--set", key)]
    CliRunner().invoke(app, ["tiny", "--steps", "7", *options, "--seed", "5"])
    wanted = TrainConfig(
        model=ModelConfig(num_layers=3, remat="full"),
        parallel=ParallelConfig(2, 4, "greedy", replica_slots=3),
        batch=BatchConfig(16),
        optimizer=OptimizerConfig(1e-3, weight_decay=0.0),
        steps=7,
        seed=5,
    )
    assert configs == [wanted] * 2


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.num_layers=1000000000", "model has 7.9e+14 parameters; expected at most 2.7e+08, the memory of 8"),
        ("model.vocab_size=100000000000000", "model has 1.3e+16 parameters; expected at most 2.7e+08, the memory"),
        ("batch.size=8388600", "batch.size is 8388600; expected at most 16384 sequences of 128 tokens, the memory"),
    ],
)
def test_what_exceeds_the_memory_is_refused_before_it_is_built(folder, key, message, monkeypatch):
    monkeypatch.setattr("models.training.step.memory_bytes", lambda mesh: 2**30)
    monkeypatch.setattr("models.train.default_corpus", lambda max_bytes: CORPUS)
    assert refusal(app, "tiny", "--run-dir", "run", "--set", key).startswith(message)
    assert not (folder / "run").exists()


def test_the_memory_is_that_of_all_devices():
    assert 2**28 < memory_bytes(make_mesh(ParallelConfig())) < 2**60


def test_the_list_has_every_key():
    result = CliRunner().invoke(app, ["small", "--set", "list"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    sections = {field.name: getattr(TrainConfig(), field.name) for field in dataclasses.fields(TrainConfig)}
    keys = {f"{name}.{key}" for name, one in sections.items() for key in getattr(one, "__dataclass_fields__", ())}
    assert {line.split()[0] for line in lines[1:]} == keys
    assert "model.embed_dim                an integer          256      `H`, the width of the model" in lines
    # Every key has a meaning.
    assert all(len(re.split(" {2,}", line)) == 4 for line in lines[1:])
    assert "--set list" in CliRunner().invoke(app, ["--help"]).stdout


@pytest.mark.parametrize("of", [app, generate.app])
def test_the_help_names_every_system(of):
    shown = CliRunner().invoke(of, ["--help"]).stdout
    assert not [name for name in (*system_names(), *COMPARED) if name not in shown]


@pytest.mark.thorough
def test_from_a_shell():
    command = [sys.executable, "-m", "models.train", "huge"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("error: config is 'huge'; expected one of ")
    assert result.stderr.count("\n") == 1


def test_one_rank_takes_the_default_slots_and_no_others():
    """As `MoE` does: all experts are at home there."""
    config = TrainConfig(parallel=ParallelConfig(expert_parallel=1))
    programs_of(config)
    given = dataclasses.replace(config.parallel, replica_slots=2)
    with pytest.raises(ValueError, match=r"^parallel\.replica_slots is 2; expected at most 0, the experts"):
        programs_of(dataclasses.replace(config, parallel=given))
