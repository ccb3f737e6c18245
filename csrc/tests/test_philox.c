/* The known answers of Random123 (Salmon et al., kat_vectors) for philox4x32 with 10 rounds. */
#include "check.h"
#include "pad.h"

typedef struct {
    uint32_t counter[4], key[2], expected[4];
} known_answer;

static const known_answer known[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

int main(void) {
    for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
        uint32_t out[4];
        CHECK(pad_philox4x32_10(known[i].counter, known[i].key, out) == PAD_OK);
        for (int word = 0; word < 4; ++word)
            CHECK(out[word] == known[i].expected[word]);
    }
    return failures != 0;
}
