// The sizes of the pivot classifier and its last step, for the CPU and for CUDA kernels.
#pragma once

#include <cmath>

#include "common/hd.h"

namespace pad {

enum PivotSizes { HIDDEN_UNITS = 64, SCALAR_UNITS = 16, FIRST_UNITS = HIDDEN_UNITS + SCALAR_UNITS, SECOND_UNITS = 128 };

// softmax([0, x])[1]: an overflow of exp leaves 0, as it should.
PAD_HD float sigmoid(float x) { return float(1.0 / (1.0 + exp(-double(x)))); }

} // namespace pad
