// Refusals that several functions of the C ABI share: each words the error for pad_last_error().
#pragma once

#include <cstddef>
#include <cstdint>

#include "pad.h"

namespace pad {

__attribute__((format(printf, 2, 3))) pad_status fail(pad_status status, const char *format, ...);

pad_status check_size(const char *name, size_t n);

pad_status check_parents(const char *name, const int32_t *parent, size_t n);

pad_status check_roots(const char *name, const int32_t *depth, size_t n, size_t num_roots);

// bad: the first row that fits no path, n if there is none.
pad_status path_status(const char *name, size_t bad, size_t n);

pad_status check_vocab(const char *name, size_t vocab, size_t least);

// scratch and ring of pad_commit_list.
pad_status check_slots(const char *name, size_t scratch, size_t ring);

pad_status check_weights(const char *name, const pad_pivot_weights &weights);

template <typename... Pointers> pad_status check_pointers(const char *name, Pointers... pointers) {
    if ((!pointers || ...))
        return fail(PAD_ERROR_ARGUMENT, "%s: no pointer may be null", name);
    return PAD_OK;
}

} // namespace pad
