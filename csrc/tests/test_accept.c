/* The accepted path: chains, stars and random forests against a walk from child to child; every refusal. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "pad.h"

enum { MAX_N = 200, MAX_W = (MAX_N + 63) / 64 };

typedef struct {
    size_t n, num_roots;
    int32_t token[MAX_N], parent[MAX_N], depth[MAX_N], seq[MAX_N], row_pick[MAX_N];
    uint8_t accept[MAX_N];
    float score[MAX_N];
    uint64_t mask[MAX_N * MAX_W];
} forest;

typedef struct {
    int32_t path[MAX_N], length[MAX_N], end[MAX_N];
} paths;

static size_t words_of(size_t n) { return (n + 63) / 64; }

static uint32_t random_below(uint32_t limit) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % limit;
}

static void add_row(forest *f, int32_t parent) {
    const size_t i = f->n++;
    f->parent[i] = parent;
    f->depth[i] = parent < 0 ? 0 : f->depth[parent] + 1;
    f->num_roots += parent < 0;
    f->seq[i] = 7 - (int32_t)f->num_roots;
    f->token[i] = (int32_t)random_below(3);
    f->row_pick[i] = (int32_t)random_below(3);
    f->accept[i] = (uint8_t)random_below(3); /* any byte but 0 is a yes */
    f->score[i] = random_below(4) == 0 ? NAN : (float)random_below(4) - 2.0f;
}

static void fill_mask(forest *f) {
    const size_t words = words_of(f->n);
    memset(f->mask, 0, sizeof f->mask);
    for (size_t i = 0; i < f->n; ++i)
        for (int32_t j = (int32_t)i; j >= 0; j = f->parent[j])
            f->mask[i * words + (size_t)j / 64] |= (uint64_t)1 << (j % 64);
}

/* branching 0: chains; 1: stars; else a parent among the last `branching` rows of the tree */
static void draw(forest *f, size_t n, size_t num_trees, uint32_t branching) {
    size_t start = 0;
    f->n = f->num_roots = 0;
    for (size_t i = 0; i < n; ++i) {
        if (i == start)
            add_row(f, -1);
        else if (branching == 0)
            add_row(f, (int32_t)i - 1);
        else if (branching == 1)
            add_row(f, (int32_t)start);
        else
            add_row(f, (int32_t)(i - 1 - random_below((uint32_t)(i - start < branching ? i - start : branching))));
        if (f->num_roots < num_trees && random_below((uint32_t)(n / num_trees + 1)) == 0)
            start = i + 1;
    }
    fill_mask(f);
}

/* the child of `row` that stays, or -1 */
static int32_t best_child(const forest *f, size_t row, const uint8_t *accept, const float *score) {
    int32_t best = -1;
    for (size_t i = 0; i < f->n; ++i) {
        if (f->parent[i] != (int32_t)row || !accept[i])
            continue;
        if (best < 0 || (score && (score[i] > score[best] || (isnan(score[best]) && !isnan(score[i])))))
            best = (int32_t)i;
    }
    return best;
}

static void walk(const forest *f, const uint8_t *accept, const float *score, paths *out) {
    size_t total = 0, r = 0;
    for (size_t root = 0; root < f->n; ++root) {
        if (f->parent[root] >= 0)
            continue;
        int32_t last = (int32_t)root;
        out->length[r] = 0;
        for (int32_t row = last; row >= 0; row = best_child(f, (size_t)row, accept, score)) {
            out->path[total++] = last = row;
            ++out->length[r];
        }
        out->end[r++] = f->row_pick[last];
    }
}

static void check_kept(const forest *f, const uint8_t *accept, const float *score, const uint64_t *kept) {
    for (size_t i = 0; i < words_of(f->n) * 64; ++i) {
        const int bit = (int)(kept[i / 64] >> (i % 64) & 1);
        const int expected =
            i < f->n && (f->parent[i] < 0 || best_child(f, (size_t)f->parent[i], accept, score) == (int32_t)i);
        CHECK(bit == expected);
    }
}

static void check_paths(const forest *f, const paths *found, const paths *expected) {
    size_t total = 0;
    for (size_t r = 0; r < f->num_roots; ++r) {
        CHECK(found->length[r] == expected->length[r]);
        total += (size_t)expected->length[r];
    }
    CHECK(memcmp(found->path, expected->path, total * sizeof *found->path) == 0);
}

static void check_judged(const forest *f, const uint8_t *accept, const float *score) {
    uint64_t kept[MAX_W];
    paths found, expected;
    walk(f, accept, score, &expected);
    CHECK(pad_accept_bits(accept, score, f->parent, f->n, kept) == PAD_OK);
    check_kept(f, accept, score, kept);
    CHECK(pad_accept_path(f->mask, kept, f->depth, f->seq, f->n, f->num_roots, found.path, found.length) == PAD_OK);
    check_paths(f, &found, &expected);
}

static void check_match(const forest *f) {
    uint8_t accept[MAX_N];
    uint64_t kept[MAX_W];
    paths found, expected;
    CHECK(pad_accept_match(f->token, f->parent, f->row_pick, f->n, accept) == PAD_OK);
    for (size_t i = 0; i < f->n; ++i)
        CHECK(accept[i] == (f->parent[i] < 0 || f->token[i] == f->row_pick[f->parent[i]]));
    check_judged(f, accept, NULL);
    walk(f, accept, NULL, &expected);
    CHECK(pad_match_path(f->token, f->parent, f->row_pick, f->mask, f->depth, f->seq, f->n, f->num_roots, kept,
                         found.path, found.length, found.end) == PAD_OK);
    check_kept(f, accept, NULL, kept);
    check_paths(f, &found, &expected);
    CHECK(memcmp(found.end, expected.end, f->num_roots * sizeof *found.end) == 0);
}

static void test_forests(void) {
    static forest f;
    for (size_t trial = 0; trial < 600; ++trial) {
        const size_t n = trial < 64 ? trial + 1 : 1 + random_below(MAX_N);
        draw(&f, n, 1 + random_below(4), (uint32_t)(trial % 7));
        check_judged(&f, f.accept, f.score);
        check_match(&f);
        memset(f.accept, 1, sizeof f.accept);
        check_judged(&f, f.accept, f.score);
        memset(f.accept, 0, sizeof f.accept);
        check_judged(&f, f.accept, f.score);
    }
}

/* a whole chain of 200 rows: the path crosses words */
static void test_full_chain(void) {
    static forest f;
    paths found;
    uint64_t kept[MAX_W];
    draw(&f, MAX_N, 1, 0);
    while (f.num_roots != 1)
        draw(&f, MAX_N, 1, 0);
    memset(f.token, 0, sizeof f.token);
    memset(f.row_pick, 0, sizeof f.row_pick);
    f.row_pick[MAX_N - 1] = 99;
    CHECK(pad_match_path(f.token, f.parent, f.row_pick, f.mask, f.depth, f.seq, f.n, 1, kept, found.path, found.length,
                         found.end) == PAD_OK);
    CHECK(found.length[0] == MAX_N && found.end[0] == 99);
    for (int32_t i = 0; i < MAX_N; ++i)
        CHECK(found.path[i] == i);
}

static void test_scores(void) {
    const int32_t parent[5] = {-1, 0, 0, 0, 0};
    const uint8_t accept[5] = {0, 1, 1, 1, 1};
    const float rows[][5] = {{0, NAN, -INFINITY, -1, NAN},
                             {0, NAN, -INFINITY, NAN, NAN},
                             {0, NAN, NAN, NAN, NAN},
                             {0, 1, 2, 2, NAN},
                             {0, 3, INFINITY, 3, INFINITY}};
    const int best[] = {3, 2, 1, 2, 2};
    for (size_t i = 0; i < sizeof best / sizeof *best; ++i) {
        uint64_t kept = 0;
        CHECK(pad_accept_bits(accept, rows[i], parent, 5, &kept) == PAD_OK);
        CHECK(kept == ((uint64_t)1 | (uint64_t)1 << best[i]));
    }
}

static void test_empty(void) {
    CHECK(pad_accept_match(NULL, NULL, NULL, 0, NULL) == PAD_OK);
    CHECK(pad_accept_bits(NULL, NULL, NULL, 0, NULL) == PAD_OK);
    CHECK(pad_accept_path(NULL, NULL, NULL, NULL, 0, 0, NULL, NULL) == PAD_OK);
    CHECK(pad_match_path(NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL, NULL, NULL, NULL) == PAD_OK);
}

static const int32_t two[2] = {0, 1}, chain[2] = {-1, 0}, zeros[2] = {0, 0};
static const uint64_t mask[2] = {1, 3};

static pad_status path_of(uint64_t kept, const int32_t *depth, const int32_t *seq, size_t num_roots) {
    int32_t path[2], length[2];
    return pad_accept_path(mask, &kept, depth, seq, 2, num_roots, path, length);
}

static void test_refused_values(void) {
    const int32_t bad_parents[][2] = {{-2, 0}, {0, 0}, {-1, 1}, {-1, -2}, {-1, INT32_MAX}, {1, -1}};
    uint8_t accept[2] = {1, 1};
    uint64_t kept[1];
    int32_t path[2], length[2], end[2];
    for (size_t i = 0; i < sizeof bad_parents / sizeof *bad_parents; ++i) {
        const int32_t *parent = bad_parents[i];
        CHECK(pad_accept_bits(accept, NULL, parent, 2, kept) == PAD_ERROR_ARGUMENT);
        CHECK(strstr(pad_last_error(), "pad_accept_bits: the parent of row") != NULL);
        CHECK(pad_accept_match(two, parent, two, 2, accept) == PAD_ERROR_ARGUMENT);
        CHECK(pad_match_path(two, parent, two, mask, two, zeros, 2, 1, kept, path, length, end) == PAD_ERROR_ARGUMENT);
    }
    CHECK(pad_accept_bits(accept, NULL, chain, (size_t)INT32_MAX + 1, kept) == PAD_ERROR_ARGUMENT);
    CHECK(strstr(pad_last_error(), "2147483648") != NULL);
    CHECK(path_of(3, two, zeros, 1) == PAD_OK);
    CHECK(path_of(3, two, zeros, 0) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "num_roots is 0") != NULL);
    CHECK(path_of(3, two, zeros, 2) == PAD_ERROR_ARGUMENT);
    /* no root is kept; the sequences do not lie side by side; two roots of one sequence; a row without a root */
    CHECK(path_of(2, two, zeros, 1) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "row 0 fits no path") != NULL);
    CHECK(path_of(3, two, two, 1) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "row 1 fits no path") != NULL);
    CHECK(path_of(3, zeros, zeros, 2) == PAD_ERROR_ARGUMENT);
    CHECK(path_of(3, (const int32_t[2]){1, 0}, zeros, 1) == PAD_ERROR_ARGUMENT);
    /* a depth that is not the number of ancestors */
    CHECK(path_of(3, (const int32_t[2]){0, 2}, zeros, 1) == PAD_ERROR_ARGUMENT);
    CHECK(path_of(1, (const int32_t[2]){0, 2}, zeros, 1) == PAD_OK);
    CHECK(pad_accept_path(mask, kept, two, zeros, 0, 1, path, length) == PAD_ERROR_ARGUMENT);
}

static void test_two_kept_siblings(void) {
    const int32_t depth[3] = {0, 1, 1}, seq[3] = {4, 4, 4};
    const uint64_t masks[3] = {1, 3, 5}, kept = 7;
    int32_t path[3], length[1];
    CHECK(pad_accept_path(masks, &kept, depth, seq, 3, 1, path, length) == PAD_ERROR_ARGUMENT);
    CHECK(strstr(pad_last_error(), "row 2 fits no path") != NULL);
}

static void test_null_pointers(void) {
    uint8_t accept[2] = {1, 1};
    uint64_t kept[1] = {3};
    int32_t path[2], length[2], end[2];
    for (int missing = 0; missing < 4; ++missing)
        CHECK(pad_accept_match(missing == 0 ? NULL : two, missing == 1 ? NULL : chain, missing == 2 ? NULL : two, 2,
                               missing == 3 ? NULL : accept) == PAD_ERROR_ARGUMENT);
    for (int missing = 0; missing < 3; ++missing)
        CHECK(pad_accept_bits(missing == 0 ? NULL : accept, NULL, missing == 1 ? NULL : chain, 2,
                              missing == 2 ? NULL : kept) == PAD_ERROR_ARGUMENT);
    for (int missing = 0; missing < 6; ++missing)
        CHECK(pad_accept_path(missing == 0 ? NULL : mask, missing == 1 ? NULL : kept, missing == 2 ? NULL : two,
                              missing == 3 ? NULL : zeros, 2, 1, missing == 4 ? NULL : path,
                              missing == 5 ? NULL : length) == PAD_ERROR_ARGUMENT);
    for (int missing = 0; missing < 10; ++missing)
        CHECK(pad_match_path(missing == 0 ? NULL : two, missing == 1 ? NULL : chain, missing == 2 ? NULL : two,
                             missing == 3 ? NULL : mask, missing == 4 ? NULL : two, missing == 5 ? NULL : zeros, 2, 1,
                             missing == 6 ? NULL : kept, missing == 7 ? NULL : path, missing == 8 ? NULL : length,
                             missing == 9 ? NULL : end) == PAD_ERROR_ARGUMENT);
}

int main(void) {
    test_forests();
    test_full_chain();
    test_scores();
    test_empty();
    test_refused_values();
    test_two_kept_siblings();
    test_null_pointers();
    return failures != 0;
}
