"""A rule's body is part of the accept kernel: an edited one is compiled anew, and does not come from a warm cache.

Run this file by itself, with an empty folder, to see the hash that Triton caches each kernel by.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton

from pad_engine.kernels import accept

JUDGE = """import triton
import triton.language as tl


@triton.jit
def judge(token, pick):
    return token == pick{judge}, tl.zeros_like(token).to(tl.float32)


@triton.jit
def override(token, id1, id2, id3, z1, z2, z3, lse, entropy, token_logit, pivot_prob, t0, t1):
    return {override}
"""
BODIES = {
    "first": dict(judge="", override="token == id2"),
    "again": dict(judge="", override="token == id2"),
    "judge": dict(judge=" + 1", override="token == id2"),
    "override": dict(judge="", override="entropy > t0"),
}


def load(path: Path) -> Any:
    """A module by its file, as `rules` each time, so that nothing but the bodies differs."""
    spec = importlib.util.spec_from_file_location("rules", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(judge: Any, override: Any) -> Any:
    """What Triton compiles for a round of 16 rows."""
    kernel = accept.accept_kernel
    values = dict(JUDGE=judge, OVERRIDE=override, BY_CLASSIFIER=False, NUM_SEQS=1, NUM_ROWS=16, NUM_PARTS=132)
    values |= dict(NUM_ENDS=4, RING=8, BLOCK_P=64, BLOCK_R=16, PDL=False)
    types = dict.fromkeys(("mask_bits_ptr", "round_ptr", "counter_ptr", "history_ptr"), "*i64")
    types |= dict.fromkeys(("part_score_ptr", "judged_ptr", "scalars_ptr"), "*fp32")
    pointer = {name: types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in kernel.arg_names}
    signature = {name: "constexpr" if name in values else kind for name, kind in pointer.items()}
    return triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=values, attrs={})


def main(folder: Path) -> None:
    """Print the name of each pair of bodies, the hash of its source and that of what was compiled."""
    for name, bodies in BODIES.items():
        path = folder / name / "rules.py"
        path.parent.mkdir()
        path.write_text(JUDGE.format(**bodies))
        module = load(path)
        made = source(module.judge, module.override)
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        print(name, made.hash(), triton.compile(made, target=target, options=dict(num_warps=4)).hash)


def test_an_edited_body_is_compiled_anew(tmp_path: Path) -> None:
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    out = subprocess.run([sys.executable, __file__, str(tmp_path)], env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    hashes = {name: tuple(rest) for name, *rest in (line.split() for line in out.stdout.splitlines())}
    assert hashes.keys() == BODIES.keys()
    # the same text from another file is the same kernel, from the cache
    assert hashes["first"] == hashes["again"]
    for column in (0, 1):
        assert len({found[column] for found in hashes.values()}) == 3


if __name__ == "__main__":
    main(Path(sys.argv[1]))
