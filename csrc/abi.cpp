// The C ABI: arguments are checked and errors worded here; the work is in cpu/ (and, with a GPU, beside it).
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>

#include "cpu/gumbel.h"
#include "cpu/philox.h"
#include "pad.h"

namespace {

thread_local char last_error[256] = "";

__attribute__((format(printf, 2, 3))) pad_status fail(pad_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

} // namespace

extern "C" {

uint32_t pad_abi_version(void) { return PAD_ABI_VERSION; }

const char *pad_version(void) { return PAD_VERSION; }

const char *pad_last_error(void) { return last_error; }

pad_status pad_philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    if (!counter || !key || !out)
        return fail(PAD_ERROR_ARGUMENT, "pad_philox4x32_10: counter, key and out must not be null");
    pad::philox4x32_10(counter, key, out);
    return PAD_OK;
}

pad_status pad_gumbel(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t round, uint32_t first_token,
                      size_t n, float *out) {
    if (n == 0)
        return PAD_OK;
    if (!out)
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel: out must not be null");
    if (n - 1 > UINT32_MAX - first_token)
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel: first_token %lu + n %zu is past the last 32-bit token id",
                    static_cast<unsigned long>(first_token), n);
    pad::gumbel(seed, position, purpose, round, first_token, n, out);
    return PAD_OK;
}

pad_status pad_gumbel_pick(const float *logits, size_t rows, size_t vocab, size_t row_stride, const uint32_t *positions,
                           uint64_t seed, float temperature, int32_t *out_id) {
    if (rows == 0)
        return PAD_OK;
    if (vocab == 0 || vocab > INT32_MAX)
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel_pick: vocab must be in [1, 2^31 - 1], got %zu", vocab);
    if (!logits || !positions || !out_id)
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel_pick: logits, positions and out_id must not be null");
    if (!(temperature >= 0.0f && temperature <= PAD_MAX_TEMPERATURE))
        return fail(PAD_ERROR_ARGUMENT, "pad_gumbel_pick: temperature must be in [0, 1e30], got %g",
                    static_cast<double>(temperature));
    const size_t bad = pad::gumbel_pick(logits, rows, vocab, row_stride, positions, seed, temperature, out_id);
    if (bad < rows)
        return fail(PAD_ERROR_NONFINITE, "row %zu of the logits has a NaN or an infinite value, or no finite one", bad);
    return PAD_OK;
}

} // extern "C"
