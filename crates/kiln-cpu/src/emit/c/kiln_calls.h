/* How a step calls the functions of its kernels. Where their arguments are is data, not code: a step has thousands of arguments, and the C
 * compiler takes far less time over a table than over as many assignments.
 */
#ifndef KILN_CALLS_H
#define KILN_CALLS_H

#include <string.h>
#include "kiln_runtime.h"

/* What the step was called with. */
struct kiln_call {
    const kiln_runtime *rt;
    void *const *inputs;
    void *const *outputs;
    char *arena;
    const uint64_t *scalars;
};

/* Where an argument is. */
struct kiln_place {
    enum { KILN_ARENA, KILN_INPUT, KILN_OUTPUT, KILN_SCALAR } of;
    /* Byte of the arena, or number of the input, output or scalar. */
    int64_t at;
};

#define ARENA(offset) {KILN_ARENA, offset}
#define INPUT(number) {KILN_INPUT, number}
#define OUTPUT(number) {KILN_OUTPUT, number}
#define SCALAR(number) {KILN_SCALAR, number}

static void kiln_resolve(const struct kiln_call *call, const struct kiln_place *places, int64_t count, void **list) {
    for (int64_t k = 0; k < count; k++) {
        const int64_t at = places[k].at;
        switch (places[k].of) {
        case KILN_ARENA: list[k] = call->arena + at; break;
        case KILN_INPUT: list[k] = call->inputs[at]; break;
        case KILN_OUTPUT: list[k] = call->outputs[at]; break;
        case KILN_SCALAR: list[k] = (void *)(call->scalars + at); break;
        }
    }
}

static void kiln_event(const struct kiln_call *call, int kernel, int begin) {
    if (call->rt->kernel_event) call->rt->kernel_event(call->rt->pool, kernel, begin);
}

/* A function over n iterations, shared between threads in multiples of `grain`, or on the calling thread if that is 0. */
static void kiln_share(const struct kiln_call *call, int kernel, kiln_task task, int64_t n, int64_t grain, void *ctx) {
    kiln_event(call, kernel, 1);
    if (grain) call->rt->parallel_for(call->rt->pool, n, grain, task, ctx);
    else task(ctx, 0, n, 0);
    kiln_event(call, kernel, 0);
}

static void kiln_run(const struct kiln_call *call, int kernel, kiln_task task, int64_t n, int64_t grain,
                     const struct kiln_place *places, int64_t count) {
    void *list[count + 1];
    kiln_resolve(call, places, count, list);
    kiln_share(call, kernel, task, n, grain, list);
}

#define PARALLEL(kernel, task, n, grain, ...) KILN_RUN(kernel, task, n, grain, __VA_ARGS__)
#define SERIAL(kernel, task, n, ...) KILN_RUN(kernel, task, n, 0, __VA_ARGS__)
#define KILN_RUN(kernel, task, n, grain, ...)                                                               \
    do {                                                                                                    \
        static const struct kiln_place places[] = {__VA_ARGS__};                                            \
        kiln_run(&call, kernel, task, n, grain, places, sizeof places / sizeof *places);                    \
    } while (0)

/* Whether the least or the largest of some indices, found at these places, is outside of `extent` elements. A u64 that is no i64 is a negative number
 * here, and outside all the same.
 */
typedef int8_t kiln_i8;
typedef int16_t kiln_i16;
typedef int32_t kiln_i32;
typedef int64_t kiln_i64;
typedef uint8_t kiln_u8;
typedef uint16_t kiln_u16;
typedef uint32_t kiln_u32;
typedef uint64_t kiln_u64;
#define KILN_OUTSIDE(type, least, most, extent)                                                             \
    ((int64_t)*(const kiln_##type *)(least) < 0 || (uint64_t)*(const kiln_##type *)(most) >= (uint64_t)(extent))

/* The same function over the elements of several tensors, as if those were one behind the other. */
struct kiln_tensors {
    kiln_task task;
    /* Arguments for each tensor. */
    int64_t count;
    void **list;
    /* Elements up to and with each tensor. */
    const int64_t *ends;
};

static void kiln_walk(void *ctx, int64_t begin, int64_t end, int thread) {
    const struct kiln_tensors *all = ctx;
    int64_t tensor = 0, first = 0;
    while (begin < end) {
        while (all->ends[tensor] <= begin) first = all->ends[tensor++];
        const int64_t stop = all->ends[tensor] < end ? all->ends[tensor] : end;
        all->task(all->list + tensor * all->count, begin - first, stop - first, thread);
        begin = stop;
    }
}

static void kiln_run_each(const struct kiln_call *call, int kernel, kiln_task task, int64_t grain, int64_t tensors,
                          const int64_t *ends, const struct kiln_place *places, int64_t count) {
    void *list[tensors * count + 1];
    kiln_resolve(call, places, tensors * count, list);
    struct kiln_tensors all = {task, count, list, ends};
    kiln_share(call, kernel, kiln_walk, ends[tensors - 1], grain, &all);
}

#endif
