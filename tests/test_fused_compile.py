"""The fused kernels compile for every supported generation of cards, with launch parameters that fit it.

An interpreter that passes proves nothing of that. No GPU is needed, but a process of its own that does not interpret.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

# bytes of shared memory that a program may have, by compute capability
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
HALF = [
    "h_ptr",
    "x_ptr",
    "norm_ptr",
    "normed_ptr",
    "y_ptr",
    "qkv_ptr",
    "k_ptr",
    "v_ptr",
    "out_ptr",
    "cos_ptr",
    "sin_ptr",
    "tap_ptr",
]
FLOAT = (
    "scale_ptr",
    "squares_ptr",
    "part_ptr",
    "sums_ptr",
    "temperature_ptr",
    "score_ptr",
    "values_ptr",
    "token_logit_ptr",
    "tap_weight_ptr",
    "tap_part_ptr",
    "eps",
    "scale",
)
LONG = ("seed_ptr", "mask_ptr")
# hidden size, intermediate size, heads, key/value heads, head size, vocabulary: SmolLM2-135M and Llama-3.1-8B
SHAPES = [(576, 1536, 9, 3, 64, 49152), (4096, 14336, 32, 8, 128, 128256)]

# an LM head that leaves nothing beside the pick, and the pointers that it then has not
HEAD_ALONE = {"SCORED": False, "UNITS": 0, "TAP_SPLIT": 1, "row_id_ptr": None}
JUDGED: dict[str, Any] = dict.fromkeys(
    ["values_ptr", "value_ids_ptr", "node_ptr", "parent_ptr", "token_logit_ptr", "tap_ptr", "tap_weight_ptr"]
    + ["tap_part_ptr"]
)

ATTENTION = ("tree_attention_kernel", "join_splits_kernel")


def kind_of(name: str, weights: str) -> str:
    """The type of a kernel's argument."""
    if name == "w_ptr" or (weights == "fp32" and name in HALF):
        return f"*{weights}"
    if name in HALF:
        return "*bf16"
    if name in LONG:
        return "*i64"
    return ("*" if name.endswith("_ptr") else "") + ("fp32" if name in FLOAT else "i32")


def compiled(kernel: Any, values: dict[str, Any], capability: int, warps: int, weights: str = "bf16") -> dict[str, Any]:
    """What the compiler makes of a kernel for a card. weights: their type, as Triton calls it; states are bf16, or as
    wide as the weights."""
    values = {name: value for name, value in values.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in values else kind_of(name, weights) for name in kernel.arg_names}
    if "cache_desc" in signature and "cache_desc" not in values:
        signature["cache_desc"] = f"tensordesc<bf16[{values['BLOCK_S']},{values['D']}]>"
    # sizes and pointers are multiples of 16, as a launch finds out by itself
    whole = [
        i
        for i, name in enumerate(kernel.arg_names)
        if name not in values and name not in ("eps", "scale", "cache_desc")
    ]
    attrs = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attrs)
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    result = triton.compile(source, target=target, options={"num_warps": warps})
    ptx = result.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "rows": values["ROWS"],
        "shared": result.metadata.shared,
        "waits": "griddepcontrol.wait" in ptx,
        "bulk_copies": "cp.async.bulk.tensor" in ptx,
        "prefetches": "cp.async.bulk.prefetch" in ptx,
        "tensor_cores": "mma" in ptx,
        "weights": weights,
        # of one number an instruction, at an eighth of the rate of a sum
        "slow_conversions": len(re.findall(r"cvt\.rn\.\w+\.s(?:8|16)\b|cvt\.rn\.bf16\.f16", ptx)),
    }


def compile_all() -> list[dict[str, Any]]:
    """Every fused kernel, with the parameters that a card without a table takes."""
    from pad_engine.kernels.join_splits import AT_ONCE, join_splits_kernel
    from pad_engine.kernels.linear_residual import linear_residual_kernel
    from pad_engine.kernels.lm_head import lm_head_kernel
    from pad_engine.kernels.norm_gated import norm_gated_kernel
    from pad_engine.kernels.norm_linear import norm_linear_kernel
    from pad_engine.kernels.tree_attention import tree_attention_kernel
    from pad_engine.kernels.tuning import TileConfig, default_config

    found = []
    none = HEAD_ALONE | dict.fromkeys(
        ["bias_ptr", "scale_ptr", "logits_ptr", "q_norm_ptr", "k_norm_ptr", "WINDOW", "SOFTCAP"]
    )
    for width, inner, heads, kv_heads, head_dim, vocab in SHAPES:
        products = {
            "qkv": (norm_linear_kernel, (heads + 2 * kv_heads) * head_dim, width),
            "gate_up": (norm_gated_kernel, 2 * inner, width),
            "down": (linear_residual_kernel, width, inner),
            "lm_head": (lm_head_kernel, vocab, width),
        }
        for rows, capability in [(1, 90), (16, 90), (64, 89), (1, 80)]:
            pdl = int(capability == 90)
            more = {"ROWS": rows, "PDL": pdl, "NUM_SQUARES": 64, "BLOCK_SQUARES": 64, "ACT": "silu"}
            more |= {"ADD": True, "NORM": rows > 1, "SQUARES": rows > 1}
            for op, (kernel, m, k) in products.items():
                config = default_config(op, rows, m, k)
                tile = config.arguments(k) | {"PREFETCH": 1024 if pdl else 0, "LANES": 1}
                # for a few rows all that rules ask for beside the pick
                parts = {"UNITS": 64, "TAP_SPLIT": 32} if rows == 16 else JUDGED
                found.append(compiled(kernel, none | parts | more | tile, capability, config.warps))
                if rows == 16 and op != "lm_head":
                    step = min(2048, triton.next_power_of_2(k))
                    lanes = TileConfig(block=8 if op == "gate_up" else 16, block_k=step, warps=8, lanes=8)
                    tile = lanes.arguments(k) | {"PREFETCH": 1024, "LANES": lanes.lanes}
                    found.append(compiled(kernel, none | more | tile, capability, lanes.warps))
            half = triton.next_power_of_2(head_dim // 2)
            tile = {"BLOCK_M": min(64, max(16, 4 * rows)), "BLOCK_S": 64, "BLOCK_T": rows, "BLOCK_HALF": half}
            tile |= {"BLOCK_D": 2 * half, "SPLITS": 32, "HEADS": heads, "KV_HEADS": kv_heads, "D": head_dim}
            tile |= {"OWN": rows == 64, "TO_PREFIX": rows == 1, "STRICT": rows == 16, "AT_ONCE": AT_ONCE, "EACH": 1}
            found.append(compiled(join_splits_kernel, more | tile, capability, 1))
            tile |= {"STAGES": 0, "cache_desc": None}
            found.append(compiled(tree_attention_kernel, none | more | tile, capability, 4))
            if rows != 16:  # whole tiles by bulk copies, or where a card has none by others
                del tile["cache_desc"]
                found.append(compiled(tree_attention_kernel, none | more | tile | {"STAGES": 2}, capability, 4))
    return found


def compile_other_weights() -> list[dict[str, Any]]:
    """Products with weights of one byte and of four, of the larger shape: each kernel once a type of one byte, and some
    for older cards."""
    from pad_engine.kernels.linear_residual import linear_residual_kernel
    from pad_engine.kernels.lm_head import lm_head_kernel
    from pad_engine.kernels.norm_gated import norm_gated_kernel
    from pad_engine.kernels.norm_linear import norm_linear_kernel
    from pad_engine.kernels.tuning import default_config

    width, inner, heads, kv_heads, head_dim, vocab = SHAPES[1]
    products = {
        "qkv": (norm_linear_kernel, (heads + 2 * kv_heads) * head_dim, width),
        "gate_up": (norm_gated_kernel, 2 * inner, width),
        "down": (linear_residual_kernel, width, inner),
        "lm_head": (lm_head_kernel, vocab, width),
    }
    cases = [(op, *case) for op in products for case in (("i8", 1, 90), ("fp8e4nv", 16, 90))]
    found = []
    cases += [("down", "i8", 64, 80), ("qkv", "fp8e4nv", 1, 89), ("gate_up", "fp32", 64, 90)]
    cases += [(op, "fp32", 64, 89) for op in products]
    for op, weights, rows, capability in cases:
        kernel, m, k = products[op]
        config = default_config(op, rows, m, k, 4 if weights == "fp32" else 1)
        pdl = int(capability == 90)
        values = HEAD_ALONE | JUDGED | dict.fromkeys(["bias_ptr", "logits_ptr", "SOFTCAP"])
        values |= {"ROWS": rows, "PDL": pdl, "NUM_SQUARES": 64, "BLOCK_SQUARES": 64, "ACT": "silu"}
        values |= {"ADD": True, "NORM": rows > 1, "SQUARES": rows > 1}
        values |= config.arguments(k) | {"PREFETCH": 1024 if pdl else 0, "LANES": 1}
        if weights == "i8":
            del values["row_id_ptr"]  # an LM head of some tokens alone
        found.append(compiled(kernel, values, capability, config.warps, weights))
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compiled")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    run = subprocess.run([sys.executable, Path(__file__)], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_kernel_fits_its_card(kernels: list[dict[str, Any]]) -> None:
    assert len(kernels) == 2 * (4 * 6 + 3 + 3) + 15
    assert [kernel for kernel in kernels if kernel["shared"] > SHARED[kernel["capability"]]] == []


def test_kernels_wait_and_prefetch_where_the_card_can(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        hopper = kernel["capability"] == 90
        assert kernel["waits"] == hopper, kernel
        # attention reads its first keys ahead of the wait itself, and of its splits' parts there are none
        assert kernel["prefetches"] == (hopper and kernel["kernel"] not in ATTENTION), kernel


def test_bulk_copies_where_the_card_can(kernels: list[dict[str, Any]]) -> None:
    found = [kernel["capability"] for kernel in kernels if kernel["bulk_copies"]]
    assert found == [90] * len(SHAPES), "and other cards have compiled without"


def test_several_rows_run_on_tensor_cores(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        several = kernel["rows"] > 1 or kernel["kernel"] == "tree_attention_kernel"
        multiplies = several and kernel["kernel"] != "join_splits_kernel"
        # which know no fp32
        assert kernel["tensor_cores"] == (multiplies and kernel["weights"] != "fp32"), kernel


def test_weights_of_one_byte_are_not_converted_one_by_one(kernels: list[dict[str, Any]]) -> None:
    found = [kernel for kernel in kernels if kernel["weights"] in ("i8", "fp8e4nv") and kernel["capability"] >= 89]
    assert len(found) == 9 and [kernel for kernel in found if kernel["slow_conversions"]] == []


if __name__ == "__main__":
    print(json.dumps(compile_all() + compile_other_weights()))
