"""LoRA: merged weights equal PEFT's, and what a merge cannot express is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pad_engine.errors import ModelError
from pad_engine.models.lora import CONFIG, WEIGHTS, open_adapters

NAME = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{NAME}"


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "bias": "none"} | changes
    (folder / CONFIG).write_text(json.dumps(config))
    default = {f"{KEY}.lora_A.weight": torch.randn(2, 6), f"{KEY}.lora_B.weight": torch.randn(4, 2)}
    save_file(default if tensors is None else tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_equals_peft(tmp_path: Path, rslora: bool, dtype: torch.dtype) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    base = LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    targets = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=5, use_rslora=rslora, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path)
    merged = model.merge_and_unload().state_dict()
    (adapter,) = open_adapters([tmp_path])
    adapter.check(before)
    assert len(adapter.pairs) == 6
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    for name, value in before.items():
        got = adapter.apply(name, value)
        assert got.dtype == dtype
        torch.testing.assert_close(got, merged[name], rtol=tolerance, atol=tolerance)
        changed = any(f".{target}." in name for target in targets)
        assert torch.equal(got, value) != changed


def test_scale_order_and_dtype(tmp_path: Path) -> None:
    first, second = open_adapters([write_adapter(tmp_path / "a"), write_adapter(tmp_path / "b", lora_alpha=1)])
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    weight = torch.randn(4, 6)
    expected = weight + 4 * tensors[f"{KEY}.lora_B.weight"] @ tensors[f"{KEY}.lora_A.weight"]
    torch.testing.assert_close(first.apply(f"{NAME}.weight", weight), expected)
    assert second.scale == 0.5
    assert first.apply("model.norm.weight", weight) is weight
    # rounded once, at the end
    half = weight.bfloat16()
    delta = expected - weight
    assert torch.equal(first.apply(f"{NAME}.weight", half), (half.float() + delta).bfloat16())


def test_fan_in_fan_out_is_transposed(tmp_path: Path) -> None:
    (plain,) = open_adapters([write_adapter(tmp_path / "a")])
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    (turned,) = open_adapters([write_adapter(tmp_path / "b", tensors, fan_in_fan_out=True)])
    weight = torch.randn(4, 6)
    torch.testing.assert_close(turned.apply(f"{NAME}.weight", weight.T), plain.apply(f"{NAME}.weight", weight).T)
    with pytest.raises(ModelError, match=r"shape \[6, 4\], the weight has \[4, 6\]"):
        turned.apply(f"{NAME}.weight", weight)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {"q_proj": 3}},
        {"init_lora_weights": "pissa_niter_4"},
        {"peft_type": "IA3"},
        {"r": 0},
        {"lora_alpha": None},
    ],
)
def test_unsupported_settings_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_adapter(tmp_path / "a", **changes)
    with pytest.raises(ModelError, match=next(iter(changes))):
        open_adapters([folder])


@pytest.mark.parametrize(
    "key",
    [
        f"{KEY}.lora_magnitude_vector.weight",
        f"{KEY}.lora_B.bias",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.weight",
        f"{NAME}.lora_A.weight",
    ],
)
def test_other_tensors_are_named(tmp_path: Path, key: str) -> None:
    folder = write_adapter(tmp_path / "a", {key: torch.ones(2, 2)})
    with pytest.raises(ModelError, match=f"tensor {key}"):
        open_adapters([folder])


def test_targets_that_the_model_lacks_are_named(tmp_path: Path) -> None:
    (adapter,) = open_adapters([write_adapter(tmp_path / "a")])
    adapter.check([f"{NAME}.weight"])
    with pytest.raises(ModelError, match=rf"changes {NAME}\.weight"):
        adapter.check(["model.layers.0.self_attn.k_proj.weight"])


def test_an_adapter_that_does_nothing_or_breaks_everything_is_an_error(tmp_path: Path) -> None:
    """Either would be merged without a word: attention on a CPU hides NaN in queries."""
    with pytest.raises(ModelError, match="holds no tensors of an adapter"):
        open_adapters([write_adapter(tmp_path / "empty", {})])
    for half, value in (("A", float("nan")), ("B", float("inf"))):
        tensors = {f"{KEY}.lora_A.weight": torch.randn(2, 6), f"{KEY}.lora_B.weight": torch.randn(4, 2)}
        tensors[f"{KEY}.lora_{half}.weight"][0, 0] = value
        with pytest.raises(ModelError, match=rf"{NAME}.weight holds values that are not finite"):
            open_adapters([write_adapter(tmp_path / half, tensors)])


def test_one_path_is_one_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "one")
    assert [one.path for given in (folder, str(folder)) for one in open_adapters(given)] == [folder, folder]


def test_broken_folders_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        open_adapters([tmp_path])
    one = write_adapter(tmp_path / "a", {f"{KEY}.lora_A.weight": torch.ones(2, 6)})
    with pytest.raises(ModelError, match="only one of lora_A and lora_B"):
        open_adapters([one])
    other = write_adapter(tmp_path / "b", r=3)
    with pytest.raises(ModelError, match="says r = 3"):
        open_adapters([other])
    (other / WEIGHTS).rename(other / "adapter_model.bin")
    with pytest.raises(ModelError, match=WEIGHTS) as caught:
        open_adapters([other])
    assert "pickled" in caught.value.hint
