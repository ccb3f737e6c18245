"""The kernels of a round's tail compile for sm_90 without a GPU, and never fuse a product with a sum.

Run this file by itself to see the PTX of each.
"""

import os
import subprocess
import sys

import triton
from test_gumbel_kernel import noise_kernel

from pad_engine.kernels import accept, draft_chain, draft_tree, gumbel, keep_nodes, kv_commit, ngram_lookup


def compile_all() -> None:
    """Compile every kernel for sm_90, print its PTX behind its name."""
    rows = {"mask_bits_ptr": "*i64", "round_ptr": "*i64", "counter_ptr": "*i64", "part_score_ptr": "*fp32"}
    tail = dict(JUDGE=accept.judge_pick, NUM_ROWS=16, NUM_PARTS=132, NUM_ENDS=4, RING=8, BLOCK_P=64, BLOCK_R=16)
    tail |= dict.fromkeys(["OVERRIDE", "judged_ptr", "judged_id_ptr", "scalars_ptr", "history_ptr"])
    tail |= dict(BY_CLASSIFIER=False)
    commit = dict(NUM_SEQS=1, NUM_HEADS=8, SLOTS=4160, SCRATCH=64, HEAD_DIM=128, BLOCK_R=16, BLOCK_D=128)
    chain = dict(MIN_MATCH=2, NUM_ROWS=16, NUM_PROGRAMS=32, BLOCK=256)
    words = {"row_mask_ptr": "*i64", "mask_bits_ptr": "*i64"}
    begin = dict(FEED=2, ROWS=16, CHAIN_ROWS=16, CHAIN=True, DEPTH=4)
    take = dict(STEP=2, NUM_PARTS=1056, BLOCK_P=1024, PDL=True)
    level = dict(ROWS=16, NEW=3, FIRST=12, LEVEL=3, WIDTH=3, GROWS=True, NUM_PARTS=132, BLOCK_P=256, PDL=True)
    level_types = {"values_ptr": "*fp32", "log_prob_ptr": "*fp32", "row_mask_ptr": "*i64"}
    keep = dict(COUNT=66, BLOCK=128, NODES=32, ROWS=32, DEPTH=8)
    noise = dict.fromkeys(("noise_ptr", "score_ptr", "temperature_ptr", "logits_ptr"), "*fp32")
    noise |= {"seed_ptr": "*i64", "position_ptr": "*i64"}
    for kernel, types, values in [
        (noise_kernel, noise, dict(ROWS=16, BLOCK=128)),
        (gumbel.gumbel_pick_kernel, noise, dict(BLOCK=1024)),
        *[(accept.accept_kernel, rows, tail | dict(NUM_SEQS=s, PDL=pdl)) for s, pdl in ((1, True), (4, False))],
        (kv_commit.kv_commit_kernel, {"buffer_ptr": "*bf16"}, commit | dict(PDL=True)),
        (ngram_lookup.ngram_lookup_kernel, {"mask_bits_ptr": "*i64", "best_ptr": "*i64"}, chain | dict(PDL=True)),
        (draft_chain.begin_draft_kernel, words, begin),
        (draft_chain.take_draft_kernel, rows, take),
        (draft_tree.rank_level_kernel, level_types, level),
        (keep_nodes.keep_nodes_kernel, level_types | words, keep),
    ]:
        pointer = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
        signature = {name: "constexpr" if name in values else kind for name, kind in pointer.items()}
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=values, attrs={})
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        print(f"== {kernel.__name__} PDL={values.get('PDL')}")
        print(triton.compile(source, target=target, options=dict(num_warps=4)).asm["ptx"])


def test_kernels_compile_for_sm_90_and_never_fuse(tmp_path) -> None:
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), env.get("PYTHONPATH", "")])
    out = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    kernels = dict(part.split("\n", 1) for part in out.stdout.split("== ")[1:])
    assert len(kernels) == 10
    for name, ptx in kernels.items():
        assert ("griddepcontrol.wait" in ptx) == ("PDL=True" in name), name
        # a draft's ranks need not be those of another machine
        assert "fma" not in ptx or name.startswith("rank_level"), name
    assert "mul.rn.f32" in kernels["noise_kernel PDL=None"] and ".ftz" not in kernels["noise_kernel PDL=None"]


if __name__ == "__main__":
    compile_all()
