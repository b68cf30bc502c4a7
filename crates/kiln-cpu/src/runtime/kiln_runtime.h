/* The contract between a compiled step and the runtime that calls it.
 *
 * A step is one shared object with one entry, kiln_step. It owns no threads, allocates no memory and keeps no state:
 * everything it touches arrives as an argument. This file is written beside the generated sources.
 */
#ifndef KILN_RUNTIME_H
#define KILN_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

/* One part of a parallel loop: iterations [begin, end), executed by the pool's thread number `thread`. */
typedef void (*kiln_task)(void *ctx, int64_t begin, int64_t end, int thread);

typedef struct kiln_runtime {
    /* Opaque; passed back to the functions below. */
    void *pool;
    /* Runs `task` over [0, n), in contiguous parts whose borders are multiples of `grain`; a thread may run several, one
     * after the other. Returns when all parts are done. A call from within a task runs inline. */
    void (*parallel_for)(void *pool, int64_t n, int64_t grain, kiln_task task, void *ctx);
    /* Number of threads of the pool; `thread` above is in [0, threads). */
    int threads;
    /* Called with begin = 1 before and begin = 0 after kernel number `kernel`; NULL unless the run is profiled. */
    void (*kernel_event)(void *pool, int kernel, int begin);
    /* Runs operation number `index` outside the step on `buffers` (inputs, then outputs); 0 = done. */
    int (*call_extern)(void *pool, int index, void **buffers);
} kiln_runtime;

/* What the step expects of its caller; compared with the actual arguments before each call. */
typedef struct kiln_signature {
    uint64_t abi;         /* KILN_ABI */
    uint64_t inputs;      /* number of input pointers */
    uint64_t outputs;     /* number of output pointers */
    uint64_t scalars;     /* number of 8-byte scalar arguments */
    uint64_t arena_bytes; /* size of the 64-byte aligned arena */
} kiln_signature;

#define KILN_ABI 1
#define KILN_EXPORT __attribute__((visibility("default")))

/* Runs the step once. Returns 0; 1 + the index of the extern operation that failed; or -1 - the number of the check that did. */
KILN_EXPORT int kiln_step(const kiln_runtime *rt, void *const *inputs, void *const *outputs, void *arena,
                          const uint64_t *scalars);

KILN_EXPORT extern const kiln_signature kiln_step_signature;

#endif
