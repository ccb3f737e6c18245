"""fp32 product and sum that are each rounded to nearest on their own, with denormals, whatever is around them.

A compiler fuses `a * b + c` into one rounding wherever it is allowed to, and a kernel with a matrix product needs that
permission. PTX instructions with `.rn` written out are never fused. libdevice's mul_rn and add_rn are not fused either,
but Triton links them in their form that flushes denormals to zero.
"""

import triton
import triton.language as tl

if triton.knobs.runtime.interpret:
    # numpy rounds every operation, and knows no PTX
    @triton.jit
    def mul_rn(a, b):
        return a * b

    @triton.jit
    def add_rn(a, b):
        return a + b
else:

    @triton.jit
    def mul_rn(a, b):
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)

    @triton.jit
    def add_rn(a, b):
        return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, is_pure=True, pack=1)
