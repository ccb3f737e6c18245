#include "row_stats.h"

#include <cmath>
#include <limits>

namespace pad {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float NOT_A_NUMBER = std::numeric_limits<float>::quiet_NaN();

struct Top {
    int32_t id[3] = {-1, -1, -1};
    float logit[3] = {-INF, -INF, -INF};
    bool has_nan = false;
};

void insert(Top &top, float z, int32_t id) {
    int place = 2;
    // strictly larger only, so that the lowest id comes first at ties; a place without an id takes anything
    for (; place > 0 && (z > top.logit[place - 1] || top.id[place - 1] < 0); --place) {
        top.logit[place] = top.logit[place - 1];
        top.id[place] = top.id[place - 1];
    }
    top.logit[place] = z;
    top.id[place] = id;
}

Top top_of(const float *logits, size_t vocab) {
    Top top;
    for (size_t t = 0; t < vocab; ++t) {
        const float z = logits[t];
        if (z > top.logit[2] || t < 3)
            insert(top, z, int32_t(t));
        top.has_nan |= z != z;
    }
    return top;
}

bool is_finite(const Top &top) { return !top.has_nan && top.logit[0] < INF && top.logit[0] > -INF; }

// Sums relative to the largest logit, which is finite: nothing overflows, and the entropy is no difference of large
// numbers.
void write_sums(const float *logits, size_t vocab, float peak, float *lse, float *entropy) {
    double total = 0.0, weighted = 0.0;
    for (size_t t = 0; t < vocab; ++t) {
        const float below = logits[t] - peak, e = std::exp(below);
        if (e > 0.0f) {
            total += e;
            weighted += double(e) * below;
        }
    }
    const double log_total = std::log(total);
    *lse = float(peak + log_total);
    *entropy = float(log_total - weighted / total);
}

} // namespace

size_t row_stats(const float *logits, size_t rows, size_t vocab, size_t row_stride, const StatsOut &out) {
    size_t first_bad = rows;
    for (size_t r = rows; r-- > 0;) {
        const float *row = logits + r * row_stride;
        const Top top = top_of(row, vocab);
        const bool good = is_finite(top);
        for (size_t k = 0; k < 3; ++k) {
            out.top_id[3 * r + k] = good ? top.id[k] : -1;
            out.top_logit[3 * r + k] = good ? top.logit[k] : NOT_A_NUMBER;
        }
        out.margin[r] = good ? top.logit[0] - top.logit[1] : NOT_A_NUMBER;
        out.lse[r] = out.entropy[r] = NOT_A_NUMBER;
        if (good)
            write_sums(row, vocab, top.logit[0], out.lse + r, out.entropy + r);
        else
            first_bad = r;
    }
    return first_bad;
}

void gather_judged(const pad_judged &rows, const float *logits, size_t vocab, size_t row_stride, const int32_t *token,
                   const int32_t *parent, size_t n, const StatsOut &out) {
    for (size_t i = 0; i < n; ++i) {
        const size_t row = parent[i] < 0 ? i : size_t(parent[i]);
        for (size_t k = 0; k < 3; ++k) {
            out.top_id[3 * i + k] = rows.top_id[3 * row + k];
            out.top_logit[3 * i + k] = rows.top_logit[3 * row + k];
        }
        out.lse[i] = rows.lse[row];
        out.entropy[i] = rows.entropy[row];
        const bool is_known = token[i] >= 0 && size_t(token[i]) < vocab;
        out.token_logit[i] = is_known ? logits[row * row_stride + size_t(token[i])] : -INF;
    }
}

} // namespace pad
