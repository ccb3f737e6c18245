/* The commit list against a cache of plain arrays, in which every position must be where the header says. */
#include <string.h>

#include "check.h"
#include "pad.h"

enum { SCRATCH = 9, MAX_ROWS = SCRATCH, MAX_RING = 40, STEPS = 30 };

static uint32_t random_below(uint32_t limit) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % limit;
}

/* commit random rows again and again; slot contents are the positions that they should hold */
static void check_ring(size_t ring) {
    int32_t slots[SCRATCH + MAX_RING], rows[MAX_ROWS], source[MAX_ROWS], target[MAX_ROWS];
    size_t length = 0;
    for (int step = 0; step < STEPS; ++step) {
        const size_t num_rows = random_below(MAX_ROWS + 1);
        const size_t moved = num_rows < ring ? num_rows : ring;
        const int32_t first = (int32_t)random_below((uint32_t)(SCRATCH - num_rows + 1));
        for (size_t i = 0; i < num_rows; ++i) {
            rows[i] = first + (int32_t)i;
            slots[SCRATCH - 1 - rows[i]] = (int32_t)(length + i);
        }
        memset(source, -1, sizeof source);
        memset(target, -1, sizeof target);
        CHECK(pad_commit_list(rows, num_rows, length, SCRATCH, ring, source, target) == PAD_OK);
        for (size_t i = 0; i < moved; ++i) {
            CHECK(source[i] >= 0 && source[i] < SCRATCH);
            CHECK(target[i] >= SCRATCH && target[i] < (int32_t)(SCRATCH + ring));
            slots[target[i]] = slots[source[i]];
        }
        /* nothing behind the list is written */
        for (size_t i = moved; i < MAX_ROWS; ++i)
            CHECK(source[i] == -1 && target[i] == -1);
        length += num_rows;
        for (size_t p = length > ring ? length - ring : 0; p < length; ++p)
            CHECK(slots[SCRATCH + p % ring] == (int32_t)p);
    }
}

static void test_rings(void) {
    for (size_t ring = 1; ring <= MAX_RING; ++ring)
        check_ring(ring);
}

static void test_values(void) {
    const int32_t rows[4] = {0, 2, 3, 5};
    int32_t source[4], target[4];
    CHECK(pad_commit_list(rows, 4, 10, 8, 100, source, target) == PAD_OK);
    CHECK(memcmp(source, (const int32_t[4]){7, 5, 4, 2}, sizeof source) == 0);
    CHECK(memcmp(target, (const int32_t[4]){18, 19, 20, 21}, sizeof target) == 0);
    CHECK(pad_commit_list(rows, 4, 10, 8, 3, source, target) == PAD_OK);
    CHECK(memcmp(source, (const int32_t[3]){5, 4, 2}, 3 * sizeof *source) == 0);
    CHECK(memcmp(target, (const int32_t[3]){10, 8, 9}, 3 * sizeof *target) == 0);
}

static pad_status commit(int32_t row, size_t length, size_t scratch, size_t ring) {
    int32_t source, target;
    return pad_commit_list(&row, 1, length, scratch, ring, &source, &target);
}

static void test_arguments(void) {
    int32_t row = 0, out;
    CHECK(pad_commit_list(NULL, 0, 0, 0, 0, NULL, NULL) == PAD_OK);
    CHECK(pad_commit_list(NULL, 1, 0, 1, 1, &out, &out) == PAD_ERROR_ARGUMENT);
    CHECK(pad_commit_list(&row, 1, 0, 1, 1, NULL, &out) == PAD_ERROR_ARGUMENT);
    CHECK(pad_commit_list(&row, 1, 0, 1, 1, &out, NULL) == PAD_ERROR_ARGUMENT);
    CHECK(commit(0, 0, 1, 1) == PAD_OK);
    CHECK(commit(-1, 0, 4, 1) == PAD_ERROR_ARGUMENT);
    CHECK(commit(4, 0, 4, 1) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "scratch = 4") != NULL);
    CHECK(commit(0, 0, 0, 1) == PAD_ERROR_ARGUMENT);
    CHECK(commit(0, 0, 4, 0) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "ring") != NULL);
    CHECK(commit(0, 0, 4, INT32_MAX - 4) == PAD_OK);
    CHECK(commit(0, 0, 4, INT32_MAX - 3) == PAD_ERROR_ARGUMENT);
    CHECK(commit(0, 0, SIZE_MAX, 2) == PAD_ERROR_ARGUMENT);
    CHECK(commit(0, 0, 4, SIZE_MAX) == PAD_ERROR_ARGUMENT);
    CHECK(commit(0, INT32_MAX - 1, 4, 7) == PAD_OK);
    CHECK(commit(0, INT32_MAX, 4, 7) == PAD_ERROR_ARGUMENT && strstr(pad_last_error(), "2147483647") != NULL);
    CHECK(commit(0, SIZE_MAX, 4, 7) == PAD_ERROR_ARGUMENT);
}

int main(void) {
    test_rings();
    test_values();
    test_arguments();
    return failures != 0;
}
