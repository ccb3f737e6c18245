"""GGUF conversion: tiny random models are written as llama.cpp would, converted, and compared with the original."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from pad_engine.errors import ModelError
from pad_engine.models import gguf as conversion
from pad_engine.models.gguf import convert
from pad_engine.models.sources import resolve

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE = 7, 64, 4, 2, 16, 96
COMMON = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *byte_alphabet(),
        "he",
        "ll",
        "hell",
        "hello",
        "12",
        "Ġhello",
    ]
    merges = ["h e", "l l", "he ll", "hell o", "1 2", "Ġ hello"]
    return tokens, [3] * 3 + [1] * (len(tokens) - 3), merges


def build_model(family: str) -> Any:
    import transformers as t

    vocab = len(vocabulary()[0])
    torch.manual_seed(1)
    if family == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(vocab_size=vocab, rope_theta=5e4, **COMMON))
    elif family == "llama3":
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 8192
        model = t.LlamaForCausalLM(t.LlamaConfig(vocab_size=vocab, rope_theta=5e5, rope_scaling=scaling, **COMMON))
    elif family == "qwen2":
        model = t.Qwen2ForCausalLM(t.Qwen2Config(vocab_size=vocab, **COMMON))
    elif family == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(vocab_size=vocab, **(COMMON | {"head_dim": 32})))
    else:
        changes = {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": HEAD_DIM}
        model = t.Gemma3ForCausalLM(t.Gemma3TextConfig(vocab_size=vocab, rope_theta=1e6, **(COMMON | changes)))
    for parameter in model.parameters():
        # not near 0 or 1, so that a forgotten norm shows; exact in bf16, so that nothing is lost
        parameter.data = (torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1) * 0.5).bfloat16().float()
    return model.eval()


def permuted(weight: Tensor, heads: int) -> Tensor:
    # llama.cpp's convert_hf_to_gguf.py
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def gguf_tensors(model: Any, family: str) -> dict[str, np.ndarray]:
    tensors = {}
    names = GEMMA_NAMES if family == "gemma3" else NAMES
    for name, value in model.state_dict().items():
        value = value.float()
        if family.startswith("llama") and "q_proj" in name:
            value = permuted(value, HEADS)
        if family.startswith("llama") and "k_proj" in name:
            value = permuted(value, KV_HEADS)
        if family == "gemma3" and "norm" in name:
            value = value + 1
        top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
        if name == "lm_head.weight":
            if family == "gemma3":
                continue
            new = "output.weight"
        elif name in top:
            new = top[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            new = f"blk.{layer}.{names[part]}.{kind}"
        tensors[new] = value.numpy()
    if family == "llama3":
        plain = 1 / (5e5 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).float().numpy()
    return tensors


def write_gguf(path: Path, family: str, tensors: dict[str, np.ndarray], changes: dict[str, Any] | None = None) -> Path:
    arch = {"llama3": "llama"}.get(family, family)
    writer = gguf.GGUFWriter(path, arch)
    head_dim = 32 if family == "qwen3" else HEAD_DIM
    theta = {"llama": 5e4, "llama3": 5e5, "gemma3": 1e6}.get(family, 1e4)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(theta)
    if family == "gemma3":
        writer.add_sliding_window(8)
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for key, value in (changes or {}).items():
        writer.add_uint32(key, value)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits.float()


@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "gemma3"])
def test_converted_logits_equal_the_original(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = build_model(family)
    path = write_gguf(tmp_path / "m.gguf", family, gguf_tensors(model, family))
    out = tmp_path / "out"
    out.mkdir()
    convert(path, out)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    # longer than the sliding window of 8
    ids = torch.randint(0, len(vocabulary()[0]), (2, 24))
    expected = logits(model, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(again, ids), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert all(value.dtype == torch.bfloat16 for value in _stored(out).values())


def _stored(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_quantised_weights_are_rounded_once_to_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # two rows at a time, with a rest
    monkeypatch.setattr(conversion, "BLOCK_ELEMENTS", 3 * HIDDEN)
    model = build_model("llama")
    tensors = gguf_tensors(model, "llama")
    packed = gguf.quants.quantize(tensors["token_embd.weight"], gguf.GGMLQuantizationType.Q8_0)
    path = tmp_path / "m.gguf"
    original = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, value: np.ndarray, **options: Any) -> None:
        if name == "token_embd.weight":
            original(self, name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            original(self, name, value, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    write_gguf(path, "llama", tensors)
    (tmp_path / "out").mkdir()
    convert(path, tmp_path / "out")
    got = _stored(tmp_path / "out")["model.embed_tokens.weight"]
    expected = torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)).bfloat16()
    assert got.shape == tensors["token_embd.weight"].shape and torch.equal(got, expected)


def test_bits_that_bf16_would_lose_are_kept(tmp_path: Path) -> None:
    tensors = gguf_tensors(build_model("llama"), "llama")
    tensors["output_norm.weight"] = tensors["output_norm.weight"] + np.float32(2**-20)
    (tmp_path / "out").mkdir()
    convert(write_gguf(tmp_path / "m.gguf", "llama", tensors), tmp_path / "out")
    norm = _stored(tmp_path / "out")["model.norm.weight"]
    assert norm.dtype == torch.float32 and np.array_equal(norm.numpy(), tensors["output_norm.weight"])


def test_large_models_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pad_engine.models.weights import Checkpoint

    monkeypatch.setattr(conversion, "SHARD_BYTES", 50_000)
    model = build_model("llama")
    (tmp_path / "out").mkdir()
    convert(write_gguf(tmp_path / "m.gguf", "llama", gguf_tensors(model, "llama")), tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    checkpoint = Checkpoint.open(tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(checkpoint.tensor(name, torch.float32), value), name


@pytest.mark.parametrize(
    "change, message",
    [
        ("arch", "architecture 'falcon' is not supported"),
        ("moe", "llama.expert_count = 4"),
        ("missing", r"tensor blk\.3\.ffn_up\.weight is missing"),
        ("foreign", "tensor blk.0.ssm_in.weight has no place"),
        ("truncated", "m.gguf"),
        ("not gguf", "not a readable GGUF"),
        ("rope", "rope_freqs.weight is not a llama3 rope scaling"),
        ("window", "sliding_window = 9"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, change: str, message: str) -> None:
    tensors = gguf_tensors(build_model("llama"), "llama")
    if change == "missing":
        del tensors["blk.3.ffn_up.weight"]
    if change == "foreign":
        tensors["blk.0.ssm_in.weight"] = np.ones((4, 4), np.float32)
    if change == "rope":
        tensors["rope_freqs.weight"] = np.linspace(1, 3, HEAD_DIM // 2, dtype=np.float32)
    keys = {"moe": {"llama.expert_count": 4}, "window": {"llama.attention.sliding_window": 9}}.get(change)
    path = write_gguf(tmp_path / "m.gguf", "falcon" if change == "arch" else "llama", tensors, keys)
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-2000])
    if change == "not gguf":
        path.write_bytes(b"GGUF" + b"\xff" * 40)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=message):
        convert(path, tmp_path / "out")


def test_tokenizer_template_and_end_tokens_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    monkeypatch.setenv("PAD_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_tensors(build_model("llama"), "llama"))
    folder = resolve(path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = vocabulary()[0]
    # digits are split first, so the merge "12" never applies
    assert tokenizer.tokenize("hello hello12") == ["hello", "Ġhello", "1", "2"]
    text = "Grüße 北京\n<|im_end|> x"
    ids = tokenizer(text).input_ids
    assert tokens.index("<|im_end|>") in ids and ids[0] != 1 and tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>user\nhello<|im_end|>\n"
    # 0 is the GGUF's end of sequence, 2 the end of turn that the template writes
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, 2]
    # converted once; another file of the same name is another model
    assert resolve(str(path)) == folder
    path.write_bytes(path.read_bytes() + b"\0")
    assert resolve(path) != folder
