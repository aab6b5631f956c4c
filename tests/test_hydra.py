"""The configuration, its command line and what a run of the recipe writes."""

from __future__ import annotations

import csv
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf

from lightning_tp.hydra_errors import UnknownOverrideError, check_overrides
from recipes.llama import LlamaModule
from recipes.tracking import REDACTED, loggable_config, looks_secret

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in CONF.iterdir() if folder.is_dir()
}


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=list(overrides))


def run_recipe(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the recipe in ``folder``, so that its relative output lands there."""
    return subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "train.py"), *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def column(path: Path, name: str) -> dict[int, float]:
    """Values of one column of a metrics.csv by step."""
    with path.open() as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_the_groups_hold_what_the_documentation_names() -> None:
    assert set(GROUPS["strategy"]) == {"single", "ddp", "tp", "tp_fsdp"}
    assert set(GROUPS["logger"]) == {"csv", "wandb", "tensorboard", "none"}
    assert set(GROUPS) == {"model", "data", "strategy", "trainer", "optimizer", "logger", "callbacks", "experiment"}


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group, options in GROUPS.items() for option in options]
)
def test_every_option_of_every_group_instantiates(group: str, option: str, tmp_path: Path) -> None:
    config = composed(f"{group}={option}", f"output_dir={tmp_path}")
    assert isinstance(instantiate(config.model), LightningModule)
    assert isinstance(instantiate(config.data), LightningDataModule)
    if not isinstance(config.strategy, str):
        instantiate(config.strategy)
    for node in itertools.chain(config.logger.values(), config.callbacks.values()):
        assert instantiate(node) is not None or node is None
    if option != "gpu":
        instantiate(config.trainer, devices=1, logger=False)


def test_single_and_tensor_parallel_differ_in_the_strategy_alone() -> None:
    overrides = ["trainer.devices=2", "trainer.max_steps=20", "logger=csv"]
    single, split = composed("strategy=single", *overrides), composed("strategy=tp", *overrides)
    differing = [key for key in single if single._get_node(key) != split._get_node(key)]
    assert differing == ["strategy"]


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("tp", 2), ("tp_fsdp", 4)])
def test_a_strategy_brings_its_number_of_devices(strategy: str, devices: int) -> None:
    assert composed(f"strategy={strategy}").trainer.devices == devices


def test_the_default_recipe_has_three_million_parameters_and_a_fixed_number_of_steps() -> None:
    config = composed("experiment=shakespeare_llama", "strategy=tp")
    assert config.trainer.max_steps > 0
    assert config.data.path is None
    assert config.trainer.devices == 2
    assert set(config.logger) == {"csv", "wandb"}
    assert sum(parameter.numel() for parameter in instantiate(config.model).parameters()) >= 3_000_000


@pytest.mark.parametrize(
    ("override", "hints"),
    [
        ("trainer.max_step=3", ["trainer.max_steps"]),
        ("max_steps=3", ["trainer.max_steps"]),
        ("trainer.max_step=1,2", ["trainer.max_steps"]),
        ("strategy=tpp", ["tp", "tp_fsdp"]),
        ("strategy=single,tpp", ["tp", "tp_fsdp"]),
        ("logger=[csv,wand]", ["wandb"]),
        ("stratgy=tp", ["strategy"]),
        ("experiment=shakespear", ["shakespeare_llama"]),
        ("modle.num_layers=2", ["model.num_layers"]),
        ("hydra.run.dirr=x", ["hydra.run.dir"]),
    ],
)
def test_an_unknown_override_names_what_it_may_have_meant(override: str, hints: list[str]) -> None:
    with pytest.raises(UnknownOverrideError) as caught:
        check_overrides(CONF, "train", ["optimizer.lr=1e-3", override])
    question = str(caught.value).partition("Did you mean ")[2].partition("?")[0]
    assert str(caught.value).startswith(f"{override}: ")
    assert set(hints) <= set(question.split(", "))


def test_a_key_that_the_chosen_option_lacks_is_unknown() -> None:
    check_overrides(CONF, "train", ["model=llama", "model.num_kv_heads=2"])
    with pytest.raises(UnknownOverrideError, match="model=gpt"):
        check_overrides(CONF, "train", ["model=llama,gpt", "model.num_kv_heads=2"])


@pytest.mark.parametrize(
    "override",
    [
        "trainer.max_steps=3",
        "+trainer.new=1",
        "++note=x",
        "optimizer.lr=1e-3,1e-4",
        "logger=[csv,wandb]",
        "hydra.job.name=x",
        "~callbacks.sample",
        "~logger",
    ],
)
def test_a_legal_override_passes(override: str) -> None:
    check_overrides(CONF, "train", [override])


@pytest.mark.parametrize("arguments", [["trainer.max_step=3"], ["-m", "trainer.max_step=3,4"]])
def test_a_misspelt_command_line_ends_with_one_message(arguments: list[str], tmp_path: Path) -> None:
    result = run_recipe(tmp_path, *arguments)
    assert result.returncode == 1
    assert "Did you mean trainer.max_steps" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trainer.devices=2"], "strategy=single trains on one device, but trainer.devices=2"),
        (["-m", "strategy=ddp"], "strategy=ddp cannot run in a sweep"),
    ],
)
def test_devices_and_strategies_that_do_not_fit_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run_recipe(tmp_path, *arguments, "experiment=smoke", "callbacks=none")
    assert result.returncode == 1
    assert f"error: {message}" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_writes_the_loss_of_every_step_below_its_own_folder(tmp_path: Path) -> None:
    result = run_recipe(tmp_path, "experiment=smoke", "test=true")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    (run,) = (tmp_path / "outputs" / "train").iterdir()
    train_loss, val_loss = (
        column(run / "csv" / "metrics.csv", "train/loss"),
        column(run / "csv" / "metrics.csv", "val/loss"),
    )
    assert list(train_loss) == list(range(6))
    assert list(val_loss) == [2, 5]
    assert train_loss[0] == pytest.approx(5.545, abs=0.1)
    assert train_loss[5] < train_loss[0] - 0.1
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "sample.txt").read_text().startswith("KING HENRY.\n")
    assert str(run) in result.stdout
    assert "test/loss" in result.stdout
    restored = LlamaModule.load_from_checkpoint(run / "checkpoints" / "last.ckpt")
    assert restored.head.weight.shape == (256, 32)


def test_tensor_parallel_ranks_see_the_data_of_one_device_and_write_the_same_losses(tmp_path: Path) -> None:
    losses = []
    for strategy in ("single", "tp"):
        folder = tmp_path / strategy
        folder.mkdir()
        result = run_recipe(folder, "experiment=smoke", f"strategy={strategy}", "data.batch_size=3")
        assert result.returncode == 0, result.stderr
        # One folder for all ranks.
        (metrics,) = folder.rglob("metrics.csv")
        losses.append([column(metrics, "train/loss"), column(metrics, "val/loss")])
        assert (metrics.parents[1] / "sample.txt").is_file()
        assert result.stdout.count("A sample of the trained model:") == 1
    assert list(losses[0][0]) == list(range(6))
    for single, split in zip(*losses, strict=True):
        assert split == pytest.approx(single, rel=1e-5)


def test_a_tensor_parallel_sweep_starts_its_own_ranks_for_every_job(tmp_path: Path) -> None:
    result = run_recipe(
        tmp_path, "-m", "experiment=smoke", "callbacks=none", "strategy=tp", "model=llama_tiny,gpt_tiny"
    )
    assert result.returncode == 0, result.stderr
    (sweep,) = (tmp_path / "multirun" / "train").iterdir()
    for job in ("0", "1"):
        assert list(column(sweep / job / "csv" / "metrics.csv", "train/loss")) == list(range(6))


def test_a_run_without_logger_and_with_another_optimizer_trains(tmp_path: Path) -> None:
    result = run_recipe(tmp_path, "experiment=smoke", "logger=none", "optimizer=sgd", "trainer.precision=64-true")
    assert result.returncode == 0, result.stderr
    assert len(list(tmp_path.rglob("last.ckpt"))) == 1
    assert not list(tmp_path.rglob("metrics.csv"))


def test_a_sweep_runs_every_job_in_its_own_folder(tmp_path: Path) -> None:
    result = run_recipe(
        tmp_path, "-m", "experiment=smoke", "callbacks=none", "optimizer.lr=1e-3,3e-3", "logger=[csv,wandb]"
    )
    assert result.returncode == 0, result.stderr
    (sweep,) = (tmp_path / "multirun" / "train").iterdir()
    losses = [column(sweep / job / "csv" / "metrics.csv", "train/loss") for job in ("0", "1")]
    assert losses[0][0] == losses[1][0]
    assert losses[0][5] != losses[1][5]
    assert all(len(list((sweep / job / "wandb").glob("offline-run-*"))) == 1 for job in ("0", "1"))


def test_wandb_records_the_run_but_neither_secrets_nor_the_machine(tmp_path: Path) -> None:
    arguments = [
        "experiment=smoke",
        "callbacks=none",
        "logger=wandb",
        "+note=${oc.env:PRIVATE_NOTE}",
        "+db.password=open-sesame",
    ]
    result = run_recipe(
        tmp_path, *arguments, PRIVATE_NOTE="from-the-environment", WANDB_API_KEY="", HOSTNAME="host-of-the-test"
    )
    assert result.returncode == 0, result.stderr
    (record,) = tmp_path.glob("outputs/train/*/wandb/offline-run-*/run-*.wandb")
    content = record.read_bytes()
    for written in (b"train/loss", b"num_kv_heads", b"${oc.env:PRIVATE_NOTE}", REDACTED.encode()):
        assert written in content
    for kept_back in ("from-the-environment", "open-sesame", "host-of-the-test", str(ROOT), str(tmp_path), "train.py"):
        assert kept_back.encode() not in content
    # Neither metadata, requirements, code nor console output.
    files = [path for path in record.parent.rglob("*") if path.is_file() and path.parent.name != "logs"]
    assert files == [record]


def test_the_settings_of_wandb_leave_the_host_out() -> None:
    settings = instantiate(composed("logger=wandb").logger.wandb.settings)
    assert settings.host == ""
    assert socket.gethostname() not in str(settings.model_dump(include={"host", "username", "email"}))


def test_the_logged_configuration_is_unresolved_and_redacted() -> None:
    config = OmegaConf.create(
        {"a": {"api_key": "k", "max_new_tokens": 3, "home": "${oc.env:HOME}"}, "list": [{"authToken": "t"}]}
    )
    assert loggable_config(config) == {
        "a": {"api_key": REDACTED, "max_new_tokens": 3, "home": "${oc.env:HOME}"},
        "list": [{"authToken": REDACTED}],
    }


@pytest.mark.parametrize(
    "key", ["password", "db_password", "token", "hf_token", "HF_TOKEN", "authToken", "apikey", "client_secret"]
)
def test_a_secret_key_is_recognised(key: str) -> None:
    assert looks_secret(key)


@pytest.mark.parametrize("key", ["max_new_tokens", "tokenizer", "key", "num_kv_heads", "passes"])
def test_an_ordinary_key_is_not_taken_for_a_secret(key: str) -> None:
    assert not looks_secret(key)
