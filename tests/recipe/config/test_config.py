"""Configuration: precedence, torchtitan's files, every mistake at once, and no key that nothing reads."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli

from torchtitan.__main__ import main
from torchtitan.config import torchtitan_keys
from torchtitan.config.layout import BatchPlan, ParallelDims, plan_batch, plan_layout
from torchtitan.config.load import IN_THE_FILE_ONLY, ConfigError, load_config, to_toml
from torchtitan.config.names import flat, key_names, sections
from torchtitan.config.schema import Config, Float8, Model, Parallelism, RopeScaling, Training
from torchtitan.models.families import load_run, load_run_or_exit
from torchtitan.root import PACKAGES
from torchtitan.tools import schema as export
from torchtitan.tools import verbs

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "train_configs").glob("*.toml"))

# The keys and values of torchtitan v0.2.2's Llama 3 8B preset, and the sections its other Llama 3 presets have.
TORCHTITAN_8B = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"
[metrics]
log_freq = 10
disable_color_printing = false
enable_tensorboard = true
save_tb_folder = "tb"
enable_wandb = false
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = []
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = false
components = ["model", "loss"]
[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
freq = 500
steps = -1
"""


FLOAT8 = '[model]\nconverters = ["quantize.linear.float8"]\n[quantize.linear.float8]\n'
PRECOMPUTED = "enable_fsdp_float8_all_gather = true\nprecompute_float8_dynamic_scale_for_fsdp = true\n"
MODEL_1B = '[model]\nflavor = "1B"'


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return str(path)


def mistakes_of(tmp_path: Path, text: str, *argv: str, world_size: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run(["--job.config_file", written(tmp_path, text), *argv], world_size)
    return caught.value.mistakes


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "[training]\nsteps = 1000\nseq_len = 512\n")
    config = load_config([f"--job.config_file={path}", "--training.steps", "2000", "--compile.enable"])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (2000, 512, 8)
    assert config.compile.enable and config.job.config_file == path


def test_options_may_be_written_with_hyphens_and_switched_off(tmp_path: Path) -> None:
    path = written(tmp_path, "[metrics]\nenable_tensorboard = true\n")
    config = load_config(["--job.config-file", path, "--metrics.no-enable-tensorboard", "--optimizer.lr", "1e-3"])
    assert not config.metrics.enable_tensorboard and config.optimizer.lr == 1e-3


def test_a_mix_of_sources_survives_the_command_line(tmp_path: Path) -> None:
    path = written(
        tmp_path, '[[training.sources]]\ndataset = "pydocs"\nweight = 3\n[[training.sources]]\ndataset = "c4"\n'
    )
    config = load_config(["--job.config_file", path, "--training.steps", "300"])
    assert [(s.dataset, s.weight) for s in config.training.sources] == [("pydocs", 3.0), ("c4", 1.0)]


def test_torchtitans_llama3_preset_loads_and_means_the_same(tmp_path: Path) -> None:
    config = load_config(["--job.config_file", written(tmp_path, TORCHTITAN_8B)], world_size=64)
    assert config.model.flavor == "8B" and config.training.seq_len == 8192
    assert config.lr_scheduler.decay_ratio == 0.8 and config.activation_checkpoint.selective_ac_option == "op"


def test_defaults_are_torchtitans() -> None:
    c = Config()
    assert (c.optimizer.lr, c.optimizer.beta2, c.optimizer.weight_decay) == (8e-4, 0.95, 0.1)
    assert (c.training.local_batch_size, c.training.seq_len, c.training.steps) == (8, 2048, 10000)
    assert (c.lr_scheduler.warmup_steps, c.metrics.log_freq, c.job.dump_folder) == (200, 10, "./outputs")
    assert (c.activation_checkpoint.mode, c.activation_checkpoint.selective_ac_option) == ("selective", "2")
    assert (c.comm.init_timeout_seconds, c.comm.train_timeout_seconds) == (300, 100)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_a_shipped_file_is_right_for_the_devices_it_names(path: Path) -> None:
    text = path.read_text()
    stated = re.search(r"NGPU=(\d+)", text)
    load_config(["--job.config_file", str(path)], world_size=int(stated[1]) if stated else 1)
    assert text.startswith("#:schema ./schema.json\n")


@pytest.mark.skipif(len(PACKAGES) < 3, reason="the pages have the keys and verbs of all packages")
def test_the_json_schema_is_current() -> None:
    assert (ROOT / export.SCHEMA_FILE).read_text() == export.to_json_schema(), "run: python -m torchtitan schema"


@pytest.mark.skipif(len(PACKAGES) < 3, reason="the pages have the keys and verbs of all packages")
def test_the_documentation_of_all_keys_is_current() -> None:
    page = (ROOT / export.DOC_FILE).read_text()
    assert page == export.with_keys(page), "run: python -m torchtitan schema"
    written = (ROOT / export.VERBS_FILE).read_text()  # Pythons differ in where they break a usage line
    assert written.split() == verbs.page().split(), "run: python -m torchtitan schema"
    assert all(f"`{name.rpartition('.')[2]}`" in page for name in key_names())


def test_every_key_has_a_doc() -> None:
    for name, section in sections().items():
        assert section.__doc__ and "\n" not in section.__doc__
        for key, field in section.model_fields.items():
            assert field.description and "\n" not in field.description, f"{name}.{key}"
    assert '"description": "' in export.to_json_schema() and "\\n" not in export.to_json_schema()


def test_the_resolved_file_loads_to_the_same_configuration(tmp_path: Path) -> None:
    text = '[training]\nsteps = 300\nmax_norm = 0.5\n[[training.sources]]\ndataset = "c4"\n[debug]\nseed = 7\n'
    path = written(tmp_path, text)
    config = load_config(["--job.config_file", path])
    resolved = written(tmp_path, to_toml(config))
    assert load_config(["--job.config_file", resolved]) == config


def test_a_models_shape_survives_the_resolved_file_and_the_command_line(tmp_path: Path) -> None:
    shape = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64, "hidden_dim": 1408}
    other = {"vocab_size": 4096, "norm_eps": 1e-6, "rope_theta": 1e6, "tied_embeddings": False, "max_seq_len": 8192}
    scaling = RopeScaling(factor=32.0, original_max_seq_len=4096)
    config = Config(model=Model(**shape, **other, rope_scaling=scaling))
    assert Config.model_validate(tomli.loads(to_toml(config))) == config
    assert not Config().model_dump(exclude_none=True)["model"].keys() & {*shape, *other, "rope_scaling"}

    text = "[model]\nn_layers = 8\nrope_theta = 10000\n[model.rope_scaling]\nfactor = 32\n"
    model = load_config(["--job.config_file", written(tmp_path, text), "--model.n_layers=4"]).model
    assert model == Model(n_layers=4, rope_theta=10000.0, rope_scaling=RopeScaling(factor=32.0))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dim = 0", "model.dim = 0: input should be greater than 0"),
        ("norm_eps = inf", "model.norm_eps = Infinity: input should be a finite number"),
        ("tied_embeddings = 1", "model.tied_embeddings = 1: input should be a valid boolean"),
        ("rope_scaling = {factor = -1.0}", "model.rope_scaling.factor = -1.0: input should be greater than 0"),
        ("rope_scaling = {scale = 8.0}", "model.rope_scaling.scale = 8.0: unknown key"),
    ],
)
def test_a_wrong_value_in_a_shape_is_named(tmp_path: Path, line: str, message: str) -> None:
    (mistake,) = mistakes_of(tmp_path, f"[model]\n{line}")
    assert mistake.startswith(message)


def test_all_mistakes_of_a_file_are_listed_at_once(tmp_path: Path) -> None:
    text = """
[job]
dump_foler = "x"
[trainig]
steps = 3
[training]
lr = 3
seq_len = "2k"
epochs = 0
sources = [{dataset = "c4", weight = -1.0}]
[lr_scheduler]
warmup_steps = 20000
[fault_tolerance]
enable = true
[compile]
components = ["model", "los"]
"""
    mistakes = mistakes_of(tmp_path, text)
    expected = [
        "fault_tolerance.enable = true: MAX_RESTARTS=3 ./run_llama_train.sh restarts a run that fails",
        'job.dump_foler = "x": unknown key; did you mean job.dump_folder?',
        "[trainig]: unknown section; did you mean training?",
        "training.lr = 3: unknown key; did you mean optimizer.lr?",
        'training.seq_len = "2k": input should be a valid integer',
        "training.epochs = 0: 0 would do nothing",
        "training.sources[0].weight = -1.0: input should be greater than 0",
        "lr_scheduler.warmup_steps = 20000 is longer than the schedule of 10000 steps",
        "compile.components[1] = \"los\": input should be 'model' or 'loss'",
    ]
    assert len(mistakes) == len(expected)
    for beginning in expected:
        assert any(mistake.startswith(beginning) for mistake in mistakes), beginning


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[training]\nsteps = 1.5", "training.steps = 1.5: input should be a valid integer"),
        ("[training]\nsteps = true", "training.steps = true: input should be a valid integer"),
        ("[compile]\nenable = 1", "compile.enable = 1: input should be a valid boolean"),
        ("[optimizer]\nlr = nan", "optimizer.lr = NaN: input should be a finite number"),
        ("[training]\nsteps = 0", "training.steps = 0: input should be greater than 0"),
        ("training = 3", "training = 3: this is a section; write [training] and its keys below"),
        ('[model]\nname = "gpt"', 'model.name = "gpt" is no family of this recipe; use one of llama3, llama2'),
        ('[model]\nflavor = "9B"', 'model.flavor = "9B" is no flavor of llama3; use one of debugmodel, 60M, 100M, 1B'),
        ('[model]\nname = "llama2"\nflavor = "7B"\n[training]\nseq_len = 8192',
         "training.seq_len = 8192 is longer than llama2 7B can be: use 4096 or less"),
        ("[lr_scheduler]\ndecay_ratio = 0.99\nwarmup_steps = 200", "lr_scheduler.decay_ratio = 0.99 of 10000 steps"),
        ("[lr_scheduler]\ndecay_ratio = 0.667\nwarmup_steps = 3333",
         "lr_scheduler.decay_ratio = 0.667 of 10000 steps and 3333 warmup steps overlap; use a decay_ratio of 0.666"),
        ("job = 3", "job = 3: this is a section; write [job] and its keys below"),
        ("[lr_scheduler]\ntotal_steps = 500", "lr_scheduler.total_steps = 500 ends before training.steps = 10000"),
        ('[activation_checkpoint]\nselective_ac_option = "ops"',
         'activation_checkpoint.selective_ac_option = "ops" is not allowed; use "op", or a number'),
        ('[activation_checkpoint]\nmode = "memory_budget"',
         'activation_checkpoint.mode = "memory_budget" needs the compiler'),
        ('[training]\non_nonfinite = "skip"\n[optimizer]\nimplementation = "foreach"',
         'training.on_nonfinite = "skip" skips updates on the device, but optimizer.implementation = "foreach"'),
        ('[optimizer]\nname = "Muon"\n[training]\non_nonfinite = "skip"',
         'training.on_nonfinite = "skip" skips updates on the device, but optimizer.name = "Muon" cannot'),
        ("[optimizer]\nearly_step_in_backward = true",
         "optimizer.early_step_in_backward = true with training.max_norm = 1.0: gradients are scaled by the norm"),
        ('[optimizer]\nearly_step_in_backward = true\n[training]\nmax_norm = inf\non_nonfinite = "skip"',
         'optimizer.early_step_in_backward = true with training.on_nonfinite = "skip": an update is skipped only once'),
        ("[optimizer]\nearly_step_in_backward = true\n[training]\nmax_norm = inf\n"
         "[parallelism]\npipeline_parallel_degree = 2",
         "optimizer.early_step_in_backward = true with parallelism.pipeline_parallel_degree = 2: gradients of several"),
        ('[optimizer]\nimplementation = "foreach"\nmoments_dtype = "bfloat16"',
         'optimizer.moments_dtype = "bfloat16" requires optimizer.implementation = "fused", not "foreach"'),
        ("[training]\nsources = [{dataset = 'c4', epochs = 0}]",
         "training.sources[0].epochs = 0: 0 would do nothing; use 1 or more, or -1"),
        ("[checkpoint]\nenable = true\ncreate_seed_checkpoint = true\nload_only = true",
         "checkpoint.create_seed_checkpoint = true with load_only = true: nothing would be trained or saved; set"),
        ("[checkpoint]\ncreate_seed_checkpoint = true",
         "checkpoint.create_seed_checkpoint = true without checkpoint.enable: nothing would be trained or saved; set"),
        ("[checkpoint]\nload_step = 0", "checkpoint.load_step = 0 without checkpoint.enable: the run would begin anew"),
        ("[checkpoint]\nenable = true\nlast_save_model_only = true\nlast_save_in_hf = true\nload_only = true",
         "checkpoint.last_save_in_hf = true with load_only = true: nothing would be saved; set one of them to false"),
        ('[checkpoint]\nenable = true\nexport_dtype = "bfloat16"',
         'checkpoint.export_dtype = "bfloat16" applies to a last save of weights alone, from which a run cannot be'),
        ("[checkpoint]\nenable = true\ninitial_load_in_hf = true\ninitial_load_model_only = false",
         "checkpoint.initial_load_in_hf = true with initial_load_model_only = false: safetensors are weights alone"),
        ('[checkpoint]\nenable = true\ninitial_load_missing = ["head.*"]',
         'checkpoint.initial_load_missing = ["head.*"] is for weights alone; set checkpoint.initial_load_path'),
        ("[validation]\npatience = 3", "validation.patience = 3 without validation.enable: there is nothing to judge"),
        ("[comm]\ntrain_timeout_seconds = 1000000000000",
         "comm.train_timeout_seconds = 1000000000000: input should be less than or equal to 100000000"),
        ('[validation]\ndataset_path = ""', 'validation.dataset_path = "": string should have at least 1 character'),
        ('[checkpoint]\ninitial_load_path = "x"',
         'checkpoint.initial_load_path = "x" without checkpoint.enable: the run would begin with drawn weights; set'),
        ('[training]\ndataset_path = "x"\nsources = [{dataset = "c4"}]',
         "training.dataset_path and [[training.sources]] both name the data"),
        ('[model]\nconverters = ["quantize.linear.mx"]',
         'model.converters[0] = "quantize.linear.mx": input should be \'quantize.linear.float8\''),
        (f"{FLOAT8}precompute_float8_dynamic_scale_for_fsdp = true",
         "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp = true needs the float8 all-gather; set "
         "enable_fsdp_float8_all_gather = true, or"),
        (f'{FLOAT8}enable_fsdp_float8_all_gather = true\nrecipe_name = "rowwise"',
         "quantize.linear.float8.enable_fsdp_float8_all_gather = true needs one scale for each tensor"),
        (f'{FLOAT8}{PRECOMPUTED}[training]\nenable_cpu_offload = true',
         "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp = true with training.enable_cpu_offload"),
        (f'{FLOAT8.replace("[model]", MODEL_1B)}enable_fsdp_float8_all_gather = true',
         "quantize.linear.float8.enable_fsdp_float8_all_gather = true would part llama3 1B's output layer from"),
        (f'{FLOAT8}filter_fqns = ["auto_filter_small_kn"]\nrecipe_name = "rowwise_with_gw_hp"',
         'quantize.linear.float8.filter_fqns = ["auto_filter_small_kn"] has no sizes for recipe_name'),
        ("[parallelism]\nenable_async_tensor_parallel = true",
         "parallelism.enable_async_tensor_parallel = true with tensor_parallel_degree = 1 has nothing to overlap"),
        ("[parallelism]\nenable_async_tensor_parallel = true\ntensor_parallel_degree = 2",
         'parallelism.enable_async_tensor_parallel = true needs the compiler; set compile.enable = true'),
        ("[compile]\nenable = true\ncomponents = []", "compile.components = [] compiles nothing; name"),
        ('[metrics]\nsave_tb_folder = "/a/tb"', 'metrics.save_tb_folder = "/a/tb" must be a name inside job'),
        ('[metrics]\nsave_tb_folder = ".."', 'metrics.save_tb_folder = ".." must be a name inside job.dump_folder'),
        ('[metrics]\nsave_tb_folder = ""', 'metrics.save_tb_folder = "" must be a name inside job.dump_folder'),
        ('[profiling]\nsave_traces_folder = "tb"', 'profiling.save_traces_folder = "tb" already names something else'),
        ('[metrics]\nsave_tb_folder = "comm_traces"', 'comm.save_traces_folder = "comm_traces" already names'),
        ('[comm]\nsave_traces_folder = "hang"', 'comm.save_traces_folder = "hang" already names something else'),
        ('[comm]\nsave_traces_file_prefix = "a/b"', 'comm.save_traces_file_prefix = "a/b": string should match'),
        ("[profiling]\nenable_profiling = true\nprofile_freq = 2", "profiling.profile_freq = 2 is shorter than"),
        ("[parallelism]\nexpert_tensor_parallel_degree = 8",
         "parallelism.expert_tensor_parallel_degree = 8: torchtitan v0.2.2 has this key, but this recipe does not "
         "support it yet; remove it, or set it to 1, which changes nothing"),
        ('[checkpoint]\ninterval_type = "seconds"', 'checkpoint.interval_type = "seconds": this recipe counts steps in '
         'checkpoint.interval, and time in checkpoint.interval_minutes ("steps" is accepted)'),
        ('[model]\nconverters = ["float8"]', 'model.converters[0] = "float8": torchtitan v0.2.2\'s own 405B file says '
         'so, but v0.2.2 does not know this name either; write "quantize.linear.float8"'),
        ("[experimental]\npipeline_parallel_microbatches = 4", "experimental.pipeline_parallel_microbatches = 4: set "
         "parallelism.pipeline_parallel_microbatch_size to training.local_batch_size divided by this number"),
        ('[training]\ncompile = true\n[compile]\nenable = false', "training.compile = true: compile.enable says the "
         "same today, and is set too; remove one"),
    ],
)  # fmt: skip
def test_a_mistake_says_value_rule_and_fix(tmp_path: Path, line: str, message: str) -> None:
    (mistake,) = mistakes_of(tmp_path, line)
    assert mistake.startswith(message)


def test_what_rests_on_a_refused_value_is_not_called_wrong_too(tmp_path: Path) -> None:
    mistakes = mistakes_of(tmp_path, '[training]\nsteps = "many"\n[lr_scheduler]\ntotal_steps = 500\n')
    assert mistakes == ['training.steps = "many": input should be a valid integer']


def test_a_key_not_had_is_accepted_where_it_asks_for_nothing_and_refused_elsewhere() -> None:
    data = {"parallelism": {"expert_tensor_parallel_degree": 1}, "fault_tolerance": {"enable": False, "group_size": 7}}
    read = torchtitan_keys.read(data | {"job": {"description": "x"}})
    assert read == torchtitan_keys.Reading({"job": {"description": "x"}})
    read = torchtitan_keys.read(
        {"parallelism": {"expert_tensor_parallel_degree": True}, "fault_tolerance": {"enable": True}}
    )
    assert read.values == {} and len(read.refusals) == 2
    absent = {f"{section}.{key}" for section, keys in torchtitan_keys.KEYS.items() for key in keys}
    assert not absent & set(key_names())


OLD_FILE = """
[job]
use_for_integration_test = true
[profiling]
run_profiler = true
profile_every_x_iter = 7
[metrics]
enable_color_printing = false
rank_0_only = true
[model]
norm_type = "rmsnorm"
tokenizer_path = "./tests/assets/tokenizer"
converters = ["float8"]
[optimizer]
fused = false
[training]
batch_size = 4
warmup_steps = 2
data_parallel_degree = -1
sequence_parallel_degree = 2
enable_loss_parallel = false
compile = false
seed = 3
[experimental]
context_parallel_degree = 1
pipeline_parallel_split_points = []
enable_async_tensor_parallel = false
[checkpoint]
enable_checkpoint = true
interval_type = "steps"
model_weights_only = true
[float8]
enable_fsdp_float8_all_gather = false
filter_fqns = ["output"]
scaling_type_input = "dynamic"
[mx]
recipe_name = "mxfp8"
[memory_estimation]
enabled = false
"""


def test_a_file_of_july_2024_says_that_float8_is_off_and_validation_follows_training(tmp_path: Path) -> None:
    text = "[training]\nfp8_linear = false\nlocal_batch_size = 4\n[validation]\nenable = true\n"
    text += "[parallelism]\npipeline_parallel_degree = 2\n"
    config, _ = load_run(["--job.config_file", str(written(tmp_path, text))], 2)
    assert config.float8 is None and config.validation.local_batch_size is None


def test_files_of_older_torchtitan_mean_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, OLD_FILE)
    words = ["--training.compile", "--float8.filter_fqns", "a,b", "--experimental.pipeline_parallel_degree=2"]
    config = load_config([f"--job.config_file={path}", *words], 4)
    assert config.profiling.enable_profiling and config.profiling.profile_freq == 7
    assert config.metrics.disable_color_printing and config.model.hf_assets_path == "./tests/assets/tokenizer"
    assert config.optimizer.implementation == "foreach" and config.training.local_batch_size == 4
    assert config.lr_scheduler.warmup_steps == 2 and config.parallelism.tensor_parallel_degree == 2
    assert config.parallelism.disable_loss_parallel and config.parallelism.pipeline_parallel_degree == 2
    assert config.compile.enable and config.debug.seed == 3
    assert config.checkpoint.enable and config.checkpoint.last_save_model_only
    assert config.float8 is not None and config.float8.filter_fqns == ["a", "b"]
    said = capsys.readouterr().err.splitlines()
    assert "training.warmup_steps = 2 is torchtitan's older name: lr_scheduler.warmup_steps = 2" in said
    assert 'model.converters: "float8" is the older name of "quantize.linear.float8"' in said
    load_config([f"--job.config_file={path}"], 4, rank=1)
    assert capsys.readouterr().err == ""


def test_every_older_key_leads_to_one_of_today() -> None:
    today = set(key_names()) | {f"{section}.{key}" for section, keys in torchtitan_keys.KEYS.items() for key in keys}
    meant = {key for values in torchtitan_keys._MEANT.values() for new in values.values() for key in new}
    assert {*torchtitan_keys._RENAMED.values(), *meant} <= today
    assert not today & {*torchtitan_keys._RENAMED, *torchtitan_keys._MEANT}
    assert torchtitan_keys._INSTEAD.keys() <= today | torchtitan_keys._MEANT.keys()


def test_a_misspelt_key_of_a_section_not_had_is_named(tmp_path: Path) -> None:
    text = '[fault_tolerance]\ngroup_sise = "x"\n[quantize.linear.mx]\nrecipe_nam = "x"\n'
    text += '[[training.sources]]\ndataset = "c4"\nwieght = 2\n'
    assert mistakes_of(tmp_path, text) == [
        'fault_tolerance.group_sise = "x": unknown key; did you mean fault_tolerance.group_size?',
        'quantize.linear.mx.recipe_nam = "x": unknown key; did you mean quantize.linear.mx.recipe_name?',
        "training.sources[0].wieght = 2: unknown key; did you mean training.sources[0].weight?",
    ]


def test_a_section_within_sections_is_read_from_file_and_command_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[quantize.linear.float8]\nrecipe_name = "rowwise"\nfilter_fqns = ["output"]\n[quantize.linear.mx]\n'
        'recipe_name = "mxfp8_cublas"\n',
    )
    options = ["--quantize.linear.float8.recipe_name", "tensorwise", "--quantize.linear.float8.emulate"]
    config = load_config(["--job.config_file", path, *options, "--quantize.linear.mx.filter_fqns", "x"])
    assert config.quantize.linear.float8 == Float8(recipe_name="tensorwise", filter_fqns=["output"], emulate=True)
    resolved = written(tmp_path, to_toml(config))
    assert load_config(["--job.config_file", resolved]).quantize == config.quantize


def test_a_mistake_in_a_section_within_sections_is_named_and_leaves_the_rest_to_be_checked(tmp_path: Path) -> None:
    assert mistakes_of(
        tmp_path, FLOAT8 + 'emulte = true\nemulate = true\nrecipe_name = "x"\n[compile]\nenable = true'
    ) == [
        "quantize.linear.float8.recipe_name = \"x\": input should be 'tensorwise', 'rowwise' or 'rowwise_with_gw_hp'",
        "quantize.linear.float8.emulte = true: unknown key; did you mean quantize.linear.float8.emulate?",
        "quantize.linear.float8.emulate = true computes as plain operations, which a compiled model cannot: set "
        'it to false, or remove "model" from compile.components',
    ]
    assert mistakes_of(tmp_path, "[quantize.linear.flot8]\nemulate = true") == [
        "[quantize.linear.flot8]: unknown section; did you mean quantize.linear.float8?"
    ]
    assert mistakes_of(tmp_path, "[quantize]\nlinear = 3") == [
        "quantize.linear = 3: this is a section; write [quantize.linear] and its keys below"
    ]


def test_the_command_lines_mistakes_are_listed_with_the_files(tmp_path: Path) -> None:
    assert mistakes_of(tmp_path, "[training]\nsteps = 0\n", "--training.seq_len", "-1", "--optimizer.lr=nan") == [
        "optimizer.lr = NaN: input should be a finite number",
        "training.seq_len = -1: input should be greater than 0",
        "training.steps = 0: input should be greater than 0",
    ]


def test_a_right_value_on_the_command_line_mends_a_wrong_one_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, '[training]\nsteps = "many"\n')
    assert load_config(["--job.config_file", path, "--training.steps", "300"]).training.steps == 300


def test_options_not_had_are_accepted_where_they_ask_for_nothing(tmp_path: Path) -> None:
    load_config(
        ["--parallelism.expert_tensor_parallel_degree=1", "--fault_tolerance.group_size=5", "--training.steps=300"]
    )
    with pytest.raises(ConfigError) as caught:
        load_config(
            ["--parallelism.expert-tensor-parallel-degree", "2", "--fault_tolerance.enable", "--training.steps", "300"]
        )
    assert [mistake.split(":")[0] for mistake in caught.value.mistakes] == [
        "parallelism.expert_tensor_parallel_degree = 2",
        "fault_tolerance.enable = true",
    ]


def test_the_last_file_named_is_the_one_read_and_recorded(tmp_path: Path) -> None:
    path = written(tmp_path, "[training]\nsteps = 300\n")
    config = load_config(["--job.config_file=elsewhere.toml", "--job.config_file", path])
    assert config.training.steps == 300 and config.job.config_file == path


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf[training]\nsteps = 300\n")
    assert load_config(["--job.config_file", str(tmp_path / "bom.toml")]).training.steps == 300


def test_a_clipping_norm_may_be_infinite() -> None:
    assert load_config(["--training.max_norm", "inf"]).training.max_norm == float("inf")


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml: 1 mistake\n  cannot be read: No such file"):
        load_config(["--job.config_file", "nowhere.toml"])
    with pytest.raises(ConfigError, match="is not TOML: .*line 2"):
        load_config(["--job.config_file", written(tmp_path, "[job]\nx x")])
    for value, why in (
        ("9" * 5000, "more than 64 bits"),
        ("0x1" + "0" * 16, "more than 64 bits"),
        ("[" * 21 + "]" * 21, "more than 20 levels"),
        ("[" * 9999, "more than 20 levels"),
        ('"\\u0000"', "holds a zero byte"),
    ):
        with pytest.raises(ConfigError, match=why):
            load_config(["--job.config_file", written(tmp_path, f"[job]\ndescription = {value}")])
    for empty in (["--job.config_file"], ["--job.config_file="], ["--job.config_file", "--training.steps", "3"]):
        with pytest.raises(ConfigError, match="it needs a file name"):
            load_config(empty)
    with pytest.raises(ConfigError, match="a file cannot name another"):
        load_config(["--job.config_file", written(tmp_path, '[job]\nconfig_file = "x"')])


@pytest.mark.parametrize(
    "argv", [["--job.config_file", "nowhere.toml"], ["--training.stpes", "3"], ["--training.steps=0"]]
)
def test_only_rank_0_shows_the_mistakes_and_all_leave_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("torchtitan.models.families.time", SimpleNamespace(sleep=waits.append))
    for rank in (0, 1):
        with pytest.raises(SystemExit) as caught:
            load_run_or_exit(argv, 2, rank)
        printed = capsys.readouterr()
        assert caught.value.code == 2
        assert bool(printed.out + printed.err) == (rank == 0)
    assert waits == [0, 2]  # torchrun ends rank 0 as soon as another has ended


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)


def loads_torch(done: subprocess.CompletedProcess[str]) -> bool:
    """Which takes seconds; asked of a Python with -X importtime."""
    return re.search(r"\| +torch$", done.stderr, re.MULTILINE) is not None


def test_help_lists_every_key_with_its_doc_without_torch() -> None:
    done = run("-X", "importtime", "train.py", "--job.config_file", "train_configs/debug_model.toml", "--help", "all")
    assert done.returncode == 0
    shown = " ".join(done.stdout.split())
    for name, section in sections().items():
        for key, field in section.model_fields.items():
            if key not in IN_THE_FILE_ONLY:
                assert f"--{name}.{key}" in shown
                assert str(field.description).split(";")[0].split("(")[0].strip()[:40] in shown
    assert "--training.steps N (default: 100)" in shown  # the file's value, not the schema's
    assert not loads_torch(done)


def test_help_whose_reader_has_gone_ends_without_a_trace() -> None:
    command = f"{sys.executable} train.py --help all | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert not done.stderr


def test_help_begins_with_sections_and_shows_the_keys_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        with pytest.raises(SystemExit) as caught:
            load_config([*words])
        assert caught.value.code == 0
        return capsys.readouterr().out

    assert len(shown("--help").splitlines()) < 40 and max(map(len, shown("--help").splitlines())) <= 110
    section = shown("--help", "checkpoint", "--training.steps", "3")
    assert "--checkpoint.async_mode disabled|async|async_with_pinned_mem" in section and "--training" not in section
    assert "--quantize.linear.float8.filter_fqns TEXT,..." in shown("-h", "quantize")
    with pytest.raises(SystemExit, match="--help trainig: no such section; use all, or one of job, "):
        load_config(["--help", "trainig"])


def test_a_wrong_key_on_the_command_line_exits_with_2_without_torch() -> None:
    done = run("-X", "importtime", "train.py", "--training.stpes", "3")
    assert done.returncode == 2 and "--training.steps" in done.stdout + done.stderr
    assert not loads_torch(done)


def test_the_check_verb_finds_mistakes_without_torch(tmp_path: Path) -> None:
    path = written(tmp_path, "[training]\nstpes = 3\n")
    done = run("-X", "importtime", "-m", "torchtitan", "check", "--", "--job.config_file", path)
    assert done.returncode == 2 and "did you mean training.steps?" in done.stderr
    assert not loads_torch(done)
    done = run("-m", "torchtitan", "check", str(SHIPPED[0]), "--world_size", "8")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(f"{SHIPPED[0]}: llama3 .*, .* layers of .*, context .* tokens: no mistake\n", done.stdout)
    done = run("-m", "torchtitan", "check", str(SHIPPED[0]), "--", "--training.steps", "0")
    assert done.returncode == 2 and "training.steps = 0" in done.stderr


def test_a_layout_fills_the_sharded_axis() -> None:
    assert plan_layout(Parallelism(), 8) == ParallelDims(dp_shard=8)
    hybrid = plan_layout(Parallelism(data_parallel_replicate_degree=2), 8)
    assert (hybrid.dp_replicate, hybrid.dp_shard, hybrid.dp) == (2, 4, 8)
    three = plan_layout(Parallelism(tensor_parallel_degree=2, context_parallel_degree=2), 16)
    assert (three.dp_shard, three.cp, three.tp, three.dp) == (4, 2, 2, 4)
    assert str(hybrid) == "dp_replicate 2 x dp_shard 4" and str(ParallelDims()) == "1 rank"
    with pytest.raises(ValueError, match="the run has 0 ranks; use 1 or more"):
        plan_layout(Parallelism(), 0)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            {"data_parallel_replicate_degree": 3},
            "degree 3 does not divide the 8 ranks; use degrees with a product of 1, 2",
        ),
        ({"tensor_parallel_degree": 4, "context_parallel_degree": 4}, "4 x context_parallel_degree 4 does not divide"),
        ({"data_parallel_shard_degree": 4}, "is 4, but the run has 8 ranks; start 4 ranks, or set"),
    ],
)
def test_degrees_that_do_not_fit_the_ranks_are_refused(tmp_path: Path, degrees: dict, message: str) -> None:
    text = "[parallelism]\n" + "\n".join(f"{key} = {value}" for key, value in degrees.items())
    (mistake,) = mistakes_of(tmp_path, text, world_size=8)
    assert message in mistake


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tensor_parallel_degree = 3\n", "= 3 does not divide the model's 16 heads; use one of 1, 2"),
        ('tensor_parallel_degree = 16\n[model]\nflavor = "8B"', "= 16 does not divide the model's 8 KV heads; use"),
        ("context_parallel_degree = 4\n[training]\nseq_len = 2044",
         "training.seq_len = 2044 does not divide into the pieces of context_parallel_degree 4 and "
         "tensor_parallel_degree 1; use a multiple of 8, as 2048"),
        ("tensor_parallel_degree = 8\n[validation]\nenable = true\nseq_len = 100", "validation.seq_len = 100 does not"),
        ("pipeline_parallel_degree = 8", "= 8 with 1F1B makes 8 stages, but the model has only 6 layers; use fewer"),
        ("pipeline_parallel_degree = 2\n[training]\nlocal_batch_size = 1",
         "training.local_batch_size = 1 makes 1 microbatches of 1, but the schedule 1F1B needs at least one for each"),
        ("pipeline_parallel_degree = 2\n[validation]\nenable = true\nlocal_batch_size = 4",
         "validation.local_batch_size = 4 goes through the training's pipeline schedule, made for"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"\n[compile]\nenable = true',
         "runs backward in two parts, which a compiled block cannot do; leave model out of compile.components, or use"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "DualPipeV"\n[activation_checkpoint]\n'
         'selective_ac_option = "op"', "runs backward in two parts, which recomputing by operation cannot do; use a n"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "InterleavedZeroBubble"\n'
         'fsdp_reshard_after_forward = "always"', "two parts, which needs the parameters that forward used; set fsdp"),
    ],
)  # fmt: skip
def test_what_a_model_or_sequence_cannot_be_split_into_is_refused(tmp_path: Path, line: str, message: str) -> None:
    (mistake,) = mistakes_of(tmp_path, f"[parallelism]\n{line}")
    assert message in mistake


def test_a_global_batch_divides_into_microbatches_and_streams() -> None:
    assert plan_batch(Training(local_batch_size=2), dp=4) == BatchPlan(8, 1, 8)
    assert plan_batch(Training(local_batch_size=2, global_batch_size=24, num_streams=12), dp=4) == BatchPlan(24, 3, 12)


def test_a_batch_that_cannot_be_divided_is_refused_with_one_that_can(tmp_path: Path) -> None:
    (mistake,) = mistakes_of(tmp_path, "[training]\nglobal_batch_size = 20", world_size=2)
    assert (
        "global_batch_size = 20 is not a multiple of local_batch_size 8 x data-parallel degree 2 = 16; use 16"
        in mistake
    )
    (mistake,) = mistakes_of(tmp_path, "[training]\nnum_streams = 3", world_size=2)
    assert "num_streams = 3 must divide the global batch of 16" in mistake and "use one of 2, 4, 8, 16" in mistake


def test_shipped_files_are_plain_toml() -> None:
    assert SHIPPED and all(tomli.loads(path.read_text()) for path in SHIPPED)


def test_an_update_in_backward_has_one_microbatch_a_step(tmp_path: Path) -> None:
    text = "[optimizer]\nearly_step_in_backward = true\n[training]\nmax_norm = inf\nglobal_batch_size = %d"
    assert mistakes_of(tmp_path, text % 64, world_size=2) == [
        "optimizer.early_step_in_backward = true with 4 local batches a step: their gradients are added up; set "
        "training.global_batch_size = 16, or optimizer.early_step_in_backward = false"
    ]


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--compile.enable", "true"], "compile.enable", True),
        (["--compile.enable=1"], "compile.enable", True),
        (["--model.tied_embeddings", "true"], "model.tied_embeddings", True),
        (["--model.tied_embeddings=no"], "model.tied_embeddings", False),
        (["--compile.enable", "--compile.enable", "False"], "compile.enable", False),
        (["--validation.enable=no"], "validation.enable", False),
        (["--metrics.enable-tensorboard", "off"], "metrics.enable_tensorboard", False),
        (["--compile.components", "loss,model", "--compile.enable"], "compile.components", ["loss", "model"]),
        (["--compile.components=loss", "--compile.enable", "true"], "compile.components", ["loss"]),
        (["--model.converters=quantize.linear.float8", "--quantize.linear.float8.filter_fqns", "a,b", "output"],
         "quantize.linear.float8.filter_fqns", ["a", "b", "output"]),
        (["--job.description", "a,b, c"], "job.description", "a,b, c"),
    ],
)  # fmt: skip
def test_booleans_and_lists_may_be_spelled_as_torchtitan_spells_them(words: list[str], key: str, value: object) -> None:
    assert flat(load_config(words).model_dump())[key] == value


def test_check_names_what_is_not_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    words = ["--model.hf_assets_path", str(tmp_path / "Llama-3.1-8B"), "--training.dataset_path", "nowhere.txt"]
    words += ["--validation.dataset_path", "nothing/*.jsonl", "--job.dump_folder", str(tmp_path / "file/run")]
    with pytest.raises(SystemExit) as refused:
        main(["check", str(ROOT / "train_configs/debug_model.toml"), "--", *words])
    said = str(refused.value)
    assert "download tokenizer meta-llama/Llama-3.1-8B --to" in said and said.count("\n") == 4
    assert "training: dataset_path = 'nowhere.txt'" in said and "validation: dataset_path = 'nothing/" in said
    assert f"cannot be written: {tmp_path / 'file'} is a file" in said
    main(["check", str(ROOT / "train_configs/debug_model.toml"), "--", "--training.steps", "5"])
    assert "no mistake" in capsys.readouterr().out and not (tmp_path / "outputs").exists()


def test_fewer_steps_on_the_command_line_keep_the_schedule_of_the_file() -> None:
    file = ["--job.config_file", str(ROOT / "train_configs/debug_model.toml")]
    for words, steps, total in (
        (["--training.steps", "5"], 5, 100),
        (["--training.steps", "500"], 500, None),
        (["--training.steps", "20", "--lr_scheduler.total_steps", "40"], 20, 40),
        (["--training.steps", "20", "--lr_scheduler.total_steps", "None"], 20, None),
        ([], 100, None),
    ):
        config = load_config([*file, *words])
        assert (config.training.steps, config.lr_scheduler.total_steps) == (steps, total)
    assert load_config(["--training.steps", "5", "--lr_scheduler.warmup_steps", "1"]).lr_scheduler.total_steps is None
