/* Version, statuses and error text; every refusal of an argument. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "pad.h"

static void test_version(void) {
    CHECK(pad_abi_version() == PAD_ABI_VERSION);
    CHECK(strlen(pad_version()) >= strlen("0.0.0"));
}

static void test_error_text(void) {
    uint32_t words[4] = {0, 0, 0, 0};
    CHECK(strcmp(pad_last_error(), "") == 0);
    CHECK(pad_philox4x32_10(NULL, words, words) == PAD_ERROR_ARGUMENT);
    CHECK(strstr(pad_last_error(), "pad_philox4x32_10") != NULL);
    CHECK(pad_philox4x32_10(words, NULL, words) == PAD_ERROR_ARGUMENT);
    CHECK(pad_philox4x32_10(words, words, NULL) == PAD_ERROR_ARGUMENT);
    /* a success leaves the text of the last failure */
    CHECK(pad_philox4x32_10(words, words, words) == PAD_OK);
    CHECK(strstr(pad_last_error(), "pad_philox4x32_10") != NULL);
}

static void test_gumbel_arguments(void) {
    float noise[2];
    CHECK(pad_gumbel(0, 0, 0, 0, 0, 0, NULL) == PAD_OK);
    CHECK(pad_gumbel(0, 0, 0, 0, 0, 1, NULL) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gumbel(0, 0, 0, 0, UINT32_MAX, 1, noise) == PAD_OK);
    CHECK(pad_gumbel(0, 0, 0, 0, UINT32_MAX, 2, noise) == PAD_ERROR_ARGUMENT);
    CHECK(strstr(pad_last_error(), "4294967295") != NULL);
}

static void test_pick_arguments(void) {
    const float logits[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    const uint32_t positions[2] = {0, 1};
    int32_t id[2] = {7, 7};
    CHECK(pad_gumbel_pick(NULL, 0, 0, 0, NULL, 0, 1.0f, NULL) == PAD_OK);
    CHECK(pad_gumbel_pick(NULL, 2, 2, 2, positions, 0, 1.0f, id) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gumbel_pick(logits, 2, 2, 2, NULL, 0, 1.0f, id) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gumbel_pick(logits, 2, 2, 2, positions, 0, 1.0f, NULL) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gumbel_pick(logits, 2, 0, 2, positions, 0, 1.0f, id) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gumbel_pick(logits, 2, (size_t)INT32_MAX + 1, SIZE_MAX, positions, 0, 1.0f, id) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gumbel_pick(logits, 2, 2, 2, positions, 0, -1.0f, id) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gumbel_pick(logits, 2, 2, 2, positions, 0, NAN, id) == PAD_ERROR_ARGUMENT);
    CHECK(pad_gumbel_pick(logits, 2, 2, 2, positions, 0, INFINITY, id) == PAD_ERROR_ARGUMENT);
    CHECK(strstr(pad_last_error(), "temperature") != NULL);
    CHECK(id[0] == 7 && id[1] == 7);
    /* rows may overlap */
    CHECK(pad_gumbel_pick(logits, 2, 4, 0, positions, 0, 0.0f, id) == PAD_OK && id[0] == 3 && id[1] == 3);
    CHECK(pad_gumbel_pick(logits, 2, 3, 1, positions, 0, 0.0f, id) == PAD_OK && id[0] == 2 && id[1] == 2);
}

int main(void) {
    test_version();
    test_error_text();
    test_gumbel_arguments();
    test_pick_arguments();
    return failures != 0;
}
