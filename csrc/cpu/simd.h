// Compile a function for several vector widths and choose at load time. The results stay the same bit for bit: the
// loops have no floating-point reductions, and -ffp-contract=off keeps products and sums separately rounded.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) &&                       \
    !defined(__SANITIZE_ADDRESS__)
// not under ASan: the choice runs before its runtime is ready
#define PAD_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PAD_VECTOR_CLONES
#endif

// into every clone, so that it is compiled for that clone's vectors
#define PAD_INLINE inline __attribute__((always_inline))
