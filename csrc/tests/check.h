/* The whole test framework: a check that prints where it failed and goes on, and the exit status. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>

static int failures = 0;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);                                             \
            ++failures;                                                                                                \
        }                                                                                                              \
    } while (0)

#endif
