"""`lightning-tp inspect` names a model in any of its ways, shows the plan, and answers why."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_tp import ShardingPlan, cli, find_plan
from lightning_tp.inspection import transformers_source
from lightning_tp.inspection.explain import explain
from lightning_tp.inspection.folding import fold, labels, without_indices
from lightning_tp.inspection.roles import parameter_roles
from lightning_tp.inspection.summary import folded_regions, folded_whole
from lightning_tp.plan.find import SearchOptions, search_plan
from tests.models import LENGTH, WIDTH, FeedForward, SelfAttention, Stack

ROOT = Path(__file__).parent.parent
LLAMA = (
    "num_hidden_layers=2", "hidden_size=64", "intermediate_size=128", "vocab_size=128", "num_attention_heads=4",
    "num_key_value_heads=2",
)  # fmt: skip

USER_CODE = """
import lightning
import torch
from torch import nn

print("this goes to standard error")


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(Mlp(), Mlp(), nn.LayerNorm(8))


class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.example_input_array = torch.randn(4, 8)
        self.net = Net()

    def forward(self, x):
        return self.net(x)


class Alone(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x):
        return self.net(x)


def with_tuple():
    return Net(), (torch.randn(4, 8),)


def with_dict():
    model = Mlp()
    return model, {"x": torch.randn(4, 8)}


def inputs():
    return torch.randn(4, 8)


def wrong_inputs():
    return torch.randn(4, 7)


def text():
    return "text"


def broken():
    raise RuntimeError("broken on purpose")


def with_argument(width):
    return Net()


def pretrained():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=64, vocab_size=64,
                                        num_attention_heads=4, num_key_value_heads=4))


NUMBER = 3
MODEL = Net()
"""

CONFIG = """
seed: 3
model:
  _target_: my_hydra_app.Model
  example: false
data:
  _target_: my_hydra_app.Data
"""

HYDRA_CODE = """
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader


class Data(lightning.LightningDataModule):
    def __init__(self, broken=False):
        super().__init__()
        self.broken = broken

    def setup(self, stage):
        if self.broken:
            raise RuntimeError("no data on purpose")

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 8), batch_size=4)


class Model(lightning.LightningModule):
    def __init__(self, example=False, manual=False):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.automatic_optimization = not manual
        if example:
            self.example_input_array = torch.randn(2, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

    def training_step(self, batch, batch_idx):
        loss = (self(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the working one."""
    (tmp_path / "users_code.py").write_text(textwrap.dedent(USER_CODE))
    (tmp_path / "my_hydra_app.py").write_text(textwrap.dedent(HYDRA_CODE))
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "main.yaml").write_text(CONFIG)
    (tmp_path / "settings" / "empty.yaml").write_text("seed: 0\n")
    monkeypatch.chdir(tmp_path)
    for name in ("users_code", "my_hydra_app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


class Result:
    """What one run of the command has given."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        try:
            self.status = cli.main(["inspect", *arguments])
        except SystemExit as exit:  # raised by argparse
            self.status = exit.code  # type: ignore[assignment]
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)


# ---- how a model is named


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("Lit", ()),
        ("with_tuple", ()),
        ("with_dict", ()),
        ("Net", ("--inputs", "users_code:inputs")),
        ("Alone", ("--inputs", "users_code:inputs")),
        ("pretrained", ()),
    ],
)
def test_a_factory_and_its_inputs(
    model: str, options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list(sys.path)
    found = Result(capsys, f"users_code:{model}", *options, "--json")
    assert found.json["plan"]["regions"]
    assert found.json["model"] == {"with_tuple": "Net", "with_dict": "Mlp", "pretrained": "LlamaForCausalLM"}.get(
        model, model
    )
    assert "this goes to standard error" in found.err
    assert sys.path == path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("users_code",), "names no model"),
        (("no_such_module:Net",), "No module named 'no_such_module'"),
        (("users_code:Nett",), "there is no Nett in users_code. Did you mean Net"),
        (("users_code:NUMBER",), "is a int, not a callable"),
        (("users_code:MODEL",), "is a Net, not a callable"),
        (("users_code:text",), "must return an nn.Module"),
        (("users_code:broken",), "RuntimeError: broken on purpose"),
        (("users_code:with_argument",), "could not be called without arguments"),
        (("users_code:Net",), "one of four things"),
        (("users_code:Net", "--inputs", "users_code"), "--inputs is 'users_code'"),
        (("users_code:Net", "--inputs", "users_code:text"), "example inputs must be"),
        (("users_code:Net", "--inputs", "users_code:wrong_inputs"), "could not be run once"),
        (("users_code:Lit", "width=3"), "overrides go with"),
        (("users_code:Lit", "--tp", "1"), "at least 2"),
        (("users_code:Lit", "--tp", "5"), "Legal sizes: [1, 2, 4, 8, 16, 32]"),
        (("users_code:Lit", "--why", "net.0.upp"), "Did you mean net.0.up"),
        (("users_code:Lit", "--save", "users_code.py/plan.yaml"), "the plan cannot be written"),
        (("users_code:Lit", "--frobnicate"), "unknown option --frobnicate"),
        ((), "MODEL"),
    ],
)
def test_one_clear_error_and_status_2(
    arguments: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Result(capsys, *arguments)
    assert found.status == 2
    assert message in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


def test_the_models_of_the_recipes_run_on_their_own_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    found = Result(capsys, "recipe:experiment=smoke", "--json", "model=gpt_tiny").json
    assert found["model"] == "GPTModule"
    assert [region["place"] for region in found["regions"]] == ["blocks.{0..1}.attn", "blocks.{0..1}.mlp"]
    assert [region["local_code"] for region in found["regions"]] == ["sizes", "as is"]
    assert found["legal_sizes"] == [1, 2, 4]


@pytest.mark.parametrize("options", [(), ("model.example=true",), ("--inputs", "users_code:inputs")])
def test_a_hydra_app_of_a_user(options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Result(capsys, "recipe", "--config-path", "settings", "--config-name", "main", "--json", *options).json
    assert found["model"] == "Model"
    assert [(region["columns"], region["rows"]) for region in found["regions"]] == [(["up"], ["down"])]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--config-name", "main", "model.exampel=true"), "model.example"),
        (("--config-name", "other"), "there is no other.yaml"),
        (("--config-name", "empty"), "the config has no `model`"),
        (("--config-name", "main", "+model.manual=true"), "optimizes manually"),
        (("--config-name", "main", "+model.wide=true"), "`model` of the config could not be built"),
        (("--config-name", "main", "+data.broken=true"), "could not be set up: RuntimeError: no data on purpose"),
        (("--config-name", "main", "~data"), "the config has no `data`"),
        (("--config-name", "main", "model._target_=torch.nn.Identity", "~model.example"), "not a LightningModule"),
    ],
)
def test_errors_of_a_hydra_app(
    options: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Result(capsys, "recipe", "--config-path", "settings", *options)
    assert found.status == 2
    assert message in found.err
    assert "Traceback" not in found.err


def test_a_config_of_transformers_by_name_class_file_and_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    transformers.LlamaConfig(
        **{key: int(value) for key, value in (entry.split("=") for entry in LLAMA)}, architectures=["LlamaModel"]
    ).save_pretrained(folder / "small")
    by_name = Result(capsys, "hf:llama", *LLAMA, "--json").json
    by_class = Result(capsys, "hf:LlamaConfig", *LLAMA, "--json").json
    by_folder = Result(capsys, "hf:small", "--json").json
    by_file = Result(capsys, "hf:small/config.json", "num_hidden_layers=1", "--json").json
    assert by_name["model"] == by_class["model"] == "LlamaForCausalLM"
    assert by_folder["model"] == by_file["model"] == "LlamaModel"
    assert [region["count"] for region in by_name["regions"]] == [2, 2]
    assert [region["count"] for region in by_file["regions"]] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "model", "inputs"),
    [
        (("gpt2", "n_layer=1", "n_embd=32", "n_head=4", "vocab_size=64"), "GPT2LMHeadModel", {"input_ids"}),
        (
            ("bert", "num_hidden_layers=1", "hidden_size=32", "num_attention_heads=4", "intermediate_size=64",
             "vocab_size=64"),
            "BertForMaskedLM",
            {"input_ids"},
        ),
        (
            ("t5", "num_layers=1", "num_decoder_layers=1", "d_model=32", "d_kv=8", "num_heads=4", "d_ff=64",
             "vocab_size=64"),
            "T5ForConditionalGeneration",
            {"input_ids", "decoder_input_ids"},
        ),
        (
            ("vit", "num_hidden_layers=1", "hidden_size=32", "num_attention_heads=4", "intermediate_size=64",
             "image_size=32"),
            "ViTForImageClassification",
            {"pixel_values"},
        ),
        (
            ("wav2vec2", "num_hidden_layers=1", "hidden_size=32", "num_attention_heads=4", "intermediate_size=64"),
            "Wav2Vec2ForCTC",
            {"input_values"},
        ),
        (
            ("whisper", "encoder_layers=1", "decoder_layers=1", "d_model=32", "encoder_attention_heads=4",
             "decoder_attention_heads=4", "encoder_ffn_dim=64", "decoder_ffn_dim=64", "vocab_size=64",
             "max_source_positions=16", "pad_token_id=0", "bos_token_id=1", "eos_token_id=2"),
            "WhisperForConditionalGeneration",
            {"input_features", "decoder_input_ids"},
        ),
        (
            ("clip", "text_config.num_hidden_layers=1", "text_config.hidden_size=32", "text_config.vocab_size=64",
             "text_config.intermediate_size=64", "text_config.num_attention_heads=4", "vision_config.image_size=32",
             "vision_config.patch_size=8", "vision_config.num_hidden_layers=1", "vision_config.hidden_size=32",
             "vision_config.num_attention_heads=4", "vision_config.intermediate_size=64"),
            "CLIPModel",
            {"input_ids", "pixel_values"},
        ),
    ],
)  # fmt: skip
def test_models_of_transformers_get_a_fitting_head_and_inputs(
    arguments: tuple[str, ...], model: str, inputs: set[str]
) -> None:
    built = transformers_source.transformers_model(arguments[0], arguments[1:])
    assert type(built).__name__ == model
    example = transformers_source.example_inputs(built)
    assert set(example) == inputs
    assert all(value.shape[0] == 2 for value in example.values())
    assert find_plan(built, example, 2).regions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hf:lama",), "Did you mean llama"),
        (("hf:some/repository",), "Models of the Hub are not downloaded"),
        (("hf:missing/config.json",), "there is no config.json"),
        (("hf:no_type.json",), "no model_type 'lllama', which the file gives. Did you mean llama"),
        (("hf:not_json.json",), "the config cannot be read"),
        (("hf:mixtral",), "experts.gate_up_proj [8, 28672, 4096] holds all experts of a layer in one tensor"),
        (("hf:mixtral",), "such as intermediate_size=1024."),
        (("hf:llama", "hidden_sise=3"), "LlamaConfig has no field hidden_sise. Did you mean hidden_size"),
        (("hf:clip", "text_config.hidden_sise=3"), "CLIPTextConfig has no field hidden_sise"),
        (("hf:llama", "hidden_size=250"), "not a multiple"),
        (("hf:llama", *LLAMA, "pad_token_id=500"), "could not be built"),
        (("hf:time_series_transformer", "prediction_length=4"), "no example can be made up"),
    ],
)
def test_errors_of_transformers_configs(
    arguments: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "no_type.json").write_text('{"model_type": "lllama"}')
    (folder / "not_json.json").write_text("{")
    found = Result(capsys, *arguments)
    assert found.status == 2
    assert message in found.err
    assert "Traceback" not in found.err


def test_without_transformers_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = Result(capsys, "hf:llama")
    assert found.status == 2
    assert "pip install 'lightning-tp[hf]'" in found.err


# ---- what is reported


def test_the_tables_are_plain_text_that_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = Result(capsys, "users_code:Lit").out
    assert "Lit: 1,120 parameters, on 2 ranks. 100.0% of the parameters of linears are split" in wide
    assert "with 4 all-reduces a step" in " ".join(wide.split())
    assert "Legal tensor-parallel sizes: 1, 2, 4, 8, 16, 32" in wide
    assert " net.{0..1}       2   up        down   as is" in wide
    assert "a vector outside of the regions" in wide
    monkeypatch.setenv("COLUMNS", "60")
    narrow = Result(capsys, "users_code:Lit").out
    for text, width in ((wide, 120), (narrow, 60)):
        assert max(map(len, text.splitlines())) <= width
        assert "\x1b" not in text
    assert "1 + 1" in narrow


def test_the_json_document_holds_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Result(capsys, "users_code:Lit", "--json", "--tp", "4", "--save", "plans/plan.yaml", "--why", "net.0.up")
    document = found.json
    plan = ShardingPlan.from_dict(document["plan"])
    assert plan == ShardingPlan.load(folder / "plans" / "plan.yaml")
    assert document["tensor_parallel_size"] == plan.tensor_parallel_size == 4
    assert document["parameters"] == 1120
    assert document["split_share"] == 1.0
    assert document["all_reduces_per_step"] == 4
    assert [entry["name"] for entry in document["why"]] == ["net.0.up"]
    assert sum(entry["parameters"] for entry in document["whole"]) == 2 * 8 + 16
    assert "plan saved to" in found.err


def test_why_explains_every_role(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = Result(
        capsys, "hf:qwen3", *LLAMA, "head_dim=16", "attention_bias=true", "--json", "--why", "model.layers.0*"
    ).json
    why = {entry["name"]: entry["facts"] for entry in document["why"]}
    attention = "model.layers.0.self_attn"
    assert why[f"{attention}.k_proj"]["role"] == f"column of region {attention}: split along dim 0"
    assert why[f"{attention}.k_proj"]["indices"] == "rank 0: 0-15; rank 1: 16-31"
    assert why[f"{attention}.k_proj"]["columns by input"] == ", ".join(f"{attention}.{n}_proj" for n in "qkv")
    assert why[f"{attention}.k_proj"]["rows"] == f"{attention}.o_proj"
    assert why[f"{attention}.k_proj"]["rule"].startswith("as is")
    assert "tolerance 1e-06" in why[f"{attention}.k_proj"]["proof"]
    assert why[f"{attention}.o_proj.weight"]["role"].startswith(f"row of region {attention}: split along dim 1")
    assert "added once" in why[f"{attention}.o_proj"]["role of bias"]
    assert "gradients are summed" in why[f"{attention}.q_norm.weight"]["role"]
    assert why["model.layers.0.input_layernorm.weight"]["reason"] == "a vector outside of the regions"
    assert why[attention]["rule"].startswith("as is")
    assert attention in why["model.layers.0"]["regions within"]
    assert why["model.layers.0.mlp.act_fn"]["role"].startswith("nothing of it is split")


def test_why_of_what_stays_whole_and_of_tied_weights(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Result(capsys, "hf:llama", *LLAMA, "tie_word_embeddings=true", "--why", "lm_head*").out
    assert "whole on every rank" in shown
    assert "tied to" in shown and "model.embed_tokens.weight" in shown
    assert "q_proj, k_proj" not in shown  # the tables are not printed


def test_how_the_local_code_was_found_and_what_ranks_share(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("n_layer=2", "n_embd=32", "n_head=4", "vocab_size=64")
    document = Result(capsys, "hf:gpt2", *small, "--json", "--why", "transformer.h.1.attn").json
    assert document["regions"][0]["place"] == "transformer.h.{0..1}.attn"
    assert document["regions"][0]["local_code"] == "attributes split_size=16"
    assert "transformer.h.1.attn.split_size=16" in document["why"][0]["facts"]["rule"]
    one_key_head = (*LLAMA[:-1], "num_key_value_heads=1", "head_dim=16")
    document = Result(capsys, "hf:gemma", *one_key_head, "--json", "--why", "*.0.self_attn.k_proj").json
    assert document["regions"][0]["columns"] == ["q_proj", "k_proj (shared)", "v_proj (shared)"]
    assert "which reads its part along dim 0" in document["why"][0]["facts"]["role"]


def test_why_of_a_module_that_is_split_at_its_edges() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x, x, x, need_weights=False)[0]

    model = Attention()
    plan = find_plan(model, torch.randn(2, 6, 16), 2)
    roles = parameter_roles(model, plan)
    (why,) = explain("inner", model, plan, roles)
    assert why.facts["rule"].startswith("adapter")
    assert "what it returns is summed" in why.facts["edges"]
    assert roles["inner.in_proj_weight"].is_sharded
    assert roles["inner.out_proj.bias"].kind == "once"
    (folded,) = folded_regions(plan)
    assert folded.rows == ("sum of its results",)


def test_compare_with_the_published_plan(capsys: pytest.CaptureFixture[str]) -> None:
    document = Result(capsys, "hf:qwen3", *LLAMA, "head_dim=16", "--json", "--compare-tp-plan").json["tp_plan"]
    verdicts = {group["name"]: group["verdict"] for group in document["groups"]}
    layer = "model.layers.{0..1}"
    for name in ("self_attn.q_proj", "self_attn.o_proj", "self_attn.q_norm", "mlp.gate_proj", "mlp.down_proj"):
        assert verdicts[f"{layer}.{name}.weight"] == "same", name
    assert verdicts["lm_head.weight"] == "only theirs"
    assert document["whole"] == 5


def test_compare_shows_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Result(capsys, "hf:phi3", *LLAMA, "pad_token_id=0", "--compare-tp-plan").out
    assert "differs: theirs gathers the output" in " ".join(shown.split())
    document = Result(capsys, "hf:mixtral", *LLAMA, "num_local_experts=4", "--json", "--compare-tp-plan").json
    verdicts = {group["name"]: group["verdict"] for group in document["tp_plan"]["groups"]}
    assert verdicts["model.layers.{0..1}.mlp.experts.gate_up_proj"] == "same"
    assert verdicts["model.layers.*.mlp.experts"] == "same"


def test_models_without_a_published_plan_say_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = Result(capsys, "users_code:Lit", "--compare-tp-plan")
    assert plain.status == 0
    assert "holds no model of transformers" in plain.out
    gpt2 = Result(capsys, "hf:gpt2", "n_layer=1", "n_embd=32", "n_head=4", "vocab_size=64", "--compare-tp-plan")
    assert gpt2.status == 0
    assert "publishes no tp_plan for GPT2LMHeadModel" in gpt2.out


# ---- its parts


def test_names_of_repeated_blocks_fold_where_all_combinations_are_there() -> None:
    assert labels(["a.0.up", "a.1.up", "a.0.down", "b"]) == ["a.{0..1}.up", "a.0.down", "b"]
    assert labels(["s.0.b.0", "s.0.b.1", "s.1.b.0", "s.1.b.1"]) == ["s.{0..1}.b.{0..1}"]
    assert labels(["s.0.b.0", "s.0.b.1", "s.1.b.0"]) == ["s.0.b.{0..1}", "s.1.b.0"]
    assert labels(["a.0", "a.2", "a.10"]) == ["a.{0,2,10}"]
    (folded,) = fold(name for name in ("a.1", "a.0"))
    assert folded.names == ("a.1", "a.0")


def test_numbers_that_are_no_indices_stay() -> None:
    assert without_indices("model.layers.0.mlp and h.12") == "model.layers.*.mlp and h.*"
    assert without_indices("its numbers differ by 1.5e-3") == "its numbers differ by 1.5e-3"


@pytest.mark.parametrize(("heads", "sizes"), [(2, [1, 2]), (4, [1, 2, 4]), (8, [1, 2, 4])])
def test_legal_sizes_are_those_of_uncut_heads_and_leave_the_model_as_it_was(heads: int, sizes: list[int]) -> None:
    model = Stack(SelfAttention(heads=4), FeedForward(), SelfAttention("slice", heads=heads)).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    before = torch.get_rng_state()
    plan, legal = search_plan(model, x, 2, None, SearchOptions(), with_legal_sizes=True)
    assert plan.regions and legal == sizes
    assert torch.equal(before, torch.get_rng_state())
    assert not model.training


def test_a_model_of_which_nothing_is_split() -> None:
    model = nn.Linear(4, 4)
    plan, legal = search_plan(model, torch.randn(2, 4), 2, None, SearchOptions(), with_legal_sizes=True)
    assert legal == [1, 2]
    assert folded_regions(plan) == []
    roles = parameter_roles(model, plan)
    assert sum(entry.parameters for entry in folded_whole(model, plan, roles)) == 20
