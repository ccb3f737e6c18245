"""Whether kernels run in Triton's interpreter, which knows no assembly and takes a whole number's bits for a bf16's."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
