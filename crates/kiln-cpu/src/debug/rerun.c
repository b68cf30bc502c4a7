/* Times a compiled step alone, on random inputs: rerun [RUNS] [THREADS].
 *
 * Floats are small random numbers; integers are zeros and ones, so that indices are in range. Operations that run outside the compiled code are skipped.
 * Prints the median and the best time of a run and the kernels, slowest first.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kiln_runtime.h"

enum kind { KIND_ZERO, KIND_F32, KIND_F64, KIND_INT64, KIND_INT32, KIND_BYTES };
struct tensor { size_t bytes; enum kind kind; };
struct kernel { const char *name, *fused; uint64_t bytes, flops; };
#include "rerun.h"

/* ---- threads ---- */

static int threads = 1;
static struct { kiln_task task; void *ctx; int64_t n, grain; } loop;
static atomic_int generation, pending;
static _Thread_local int inside;

static void piece(int thread) {
    inside = 1;
    int64_t grains = (loop.n + loop.grain - 1) / loop.grain;
    int64_t begin = grains * thread / threads * loop.grain, end = grains * (thread + 1) / threads * loop.grain;
    if (end > loop.n) end = loop.n;
    if (begin < end) loop.task(loop.ctx, begin, end, thread);
    inside = 0;
}

static void *worker(void *number) {
    int seen = 0;
    for (;;) {
        for (int round = 0; atomic_load(&generation) == seen; round++)
            if (round > 2000) sched_yield();
        seen++;
        piece((int)(intptr_t)number);
        atomic_fetch_sub(&pending, 1);
    }
    return NULL;
}

static void parallel_for(void *pool, int64_t n, int64_t grain, kiln_task task, void *ctx) {
    (void)pool;
    if (n <= 0) return;
    if (threads == 1 || inside || n <= grain) {
        task(ctx, 0, n, 0);
        return;
    }
    loop.task = task, loop.ctx = ctx, loop.n = n, loop.grain = grain;
    atomic_store(&pending, threads - 1);
    atomic_fetch_add(&generation, 1);
    piece(0);
    while (atomic_load(&pending)) {}
}

/* ---- time ---- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double kernel_begin, kernel_time[KERNELS + 1];

static void kernel_event(void *pool, int kernel, int begin) {
    (void)pool;
    if (begin) kernel_begin = now();
    else kernel_time[kernel] += now() - kernel_begin;
}

static int call_extern(void *pool, int index, void **buffers) {
    (void)pool, (void)index, (void)buffers;
    return 0;
}

/* ---- arguments ---- */

static void *memory(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (!p) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(p, 0, (bytes + 64) / 64 * 64);
    return p;
}

static double random_number(void) {
    static uint64_t state = 0x9E3779B97F4A7C15u;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 40) / (1 << 24);
}

static void fill(void *p, const struct tensor *t) {
    switch (t->kind) {
    case KIND_F32:
        for (size_t i = 0; i < t->bytes / 4; i++) ((float *)p)[i] = (float)((random_number() - 0.5) * 0.1);
        break;
    case KIND_F64:
        for (size_t i = 0; i < t->bytes / 8; i++) ((double *)p)[i] = (random_number() - 0.5) * 0.1;
        break;
    case KIND_INT64:
        for (size_t i = 0; i < t->bytes / 8; i++) ((int64_t *)p)[i] = random_number() < 0.5;
        break;
    case KIND_INT32:
        for (size_t i = 0; i < t->bytes / 4; i++) ((int32_t *)p)[i] = random_number() < 0.5;
        break;
    case KIND_BYTES:
        for (size_t i = 0; i < t->bytes; i++) ((uint8_t *)p)[i] = random_number() < 0.5;
        break;
    case KIND_ZERO:
        break;
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int slowest_first(const void *a, const void *b) {
    double x = kernel_time[*(const int *)a], y = kernel_time[*(const int *)b];
    return (x < y) - (x > y);
}

/* Linux lets a process use the tiles of AMX after it asked, before it has threads (ARCH_REQ_XCOMP_PERM for
 * XFEATURE_XTILEDATA). A processor without them answers with an error, and its step has none. */
static void ask_for_tiles(void) {
#if defined(__linux__) && defined(__x86_64__)
    syscall(SYS_arch_prctl, 0x1023, 18);
#endif
}

int main(int count, char **words) {
    ask_for_tiles();
    int runs = count > 1 ? atoi(words[1]) : 9;
    threads = count > 2 ? atoi(words[2]) : DEFAULT_THREADS;
    if (runs < 1) runs = 1;
    if (threads < 1 || threads > DEFAULT_THREADS) threads = DEFAULT_THREADS;
    for (int i = 1; i < threads; i++) {
        pthread_t thread;
        pthread_create(&thread, NULL, worker, (void *)(intptr_t)i);
    }
    static void *in[INPUTS + 1], *out[OUTPUTS + 1];
    for (int i = 0; i < INPUTS; i++) fill(in[i] = memory(inputs[i].bytes), &inputs[i]);
    for (int i = 0; i < OUTPUTS; i++) out[i] = aliases[i] >= 0 ? in[aliases[i]] : memory(outputs[i].bytes);
    void *arena = memory(ARENA);
    kiln_runtime runtime = {NULL, parallel_for, threads, NULL, call_extern};
    double *times = malloc(sizeof(double) * runs);
    if (kiln_step(&runtime, in, out, arena, scalars) < 0)
        fprintf(stderr, "an index is out of range with these inputs: the step stops early\n");
    for (int i = 0; i < runs; i++) {
        double begin = now();
        kiln_step(&runtime, in, out, arena, scalars);
        times[i] = now() - begin;
    }
    qsort(times, runs, sizeof *times, by_value);
    printf("%d kernels, arena %.1f MB, %d threads\n", KERNELS, ARENA / 1e6, threads);
    printf("step: %.3f ms (median of %d), best %.3f ms\n", times[runs / 2] * 1e3, runs, times[0] * 1e3);
    runtime.kernel_event = kernel_event;
    for (int i = 0; i < runs; i++) kiln_step(&runtime, in, out, arena, scalars);
    static int order[KERNELS + 1];
    for (int i = 0; i < KERNELS; i++) order[i] = i;
    qsort(order, KERNELS, sizeof *order, slowest_first);
    for (int i = 0; i < KERNELS && i < 40; i++) {
        const struct kernel *k = &kernels[order[i]];
        double seconds = kernel_time[order[i]] / runs;
        printf("%5d %9.4f ms %7.1f GB/s %8.1f GFLOP/s  %s: %.100s\n", order[i], seconds * 1e3, k->bytes / seconds * 1e-9,
               k->flops / seconds * 1e-9, k->name, k->fused);
    }
    return 0;
}
