/* The caller of an exported step: keeps its state, makes its numbers, shares its loops between threads, reads and writes safetensors.
 *
 * What it must know of the step is in tables.h, which is generated.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kiln_runtime.h"
#include "processor.h"
#include "step.h"

enum argument_kind { SOURCE_STATE, SOURCE_INPUT };
enum output_kind { GOAL_STATE, GOAL_SPARE };
enum result_kind { TAKEN_OUTPUT, TAKEN_STATE, TAKEN_INPUT };
enum number_kind { NUMBER_FIXED, NUMBER_RATE, NUMBER_TABLE, NUMBER_SEED, NUMBER_STREAM };

/* A tensor: its bytes, its element type as safetensors names it, and its extents as they stand in JSON. */
struct tensor { const char *name; size_t bytes; const char *type, *shape; };
/* Where an argument comes from; `copied` if an output takes over its memory, which must not be that of the caller or of a constant. */
struct argument { enum argument_kind from; int index; size_t bytes; int copied; };
/* Where an output goes, and the argument whose memory it takes over (-1: none). */
struct output { enum output_kind to; int index; size_t bytes; int alias; };
/* What a result of a call is. */
struct result { enum result_kind from; int index; size_t bytes; };
/* A number of the step: bits; offset + factor * learning rate, rounded to f32 unless `wide`, as the bits of an f64; entry of a table; seed; stream. */
struct number { enum number_kind is; uint64_t bits; double offset, factor; int index, wide; };
/* The numbers of one sequence, from the step of the export on; the last one stays if `settles`. */
struct table { const uint64_t *bits; uint64_t length; int settles; };
/* Indices that the step looks at: their type, the smallest extent that they index, and where. */
struct check { const char *type; uint64_t extent; const char *where; };

#include "tables.h"

#define PUBLIC __attribute__((visibility("default")))
#define ALIGNMENT 64

struct kiln_session {
    void *states[STATES + 1];
    /* For each output that takes over no argument's memory: memory that the next run writes. */
    void *spare[OUTPUTS + 1];
    /* For each argument: memory of its own where it cannot be read in place. */
    void *staged[ARGUMENTS + 1];
    /* For each result that is a state or an input: memory that keeps it during a run where the run may write into its own. */
    void *kept[RESULTS + 1];
    void *arena;
    uint64_t steps, seed, stream;
    struct pool *pool;
    char message[512];
};

static int fail(char *message, size_t size, int code, const char *format, ...) {
    va_list words;
    va_start(words, format);
    if (message && size) vsnprintf(message, size, format, words);
    va_end(words);
    return code;
}

#define FAIL(session, code, ...) fail((session)->message, sizeof (session)->message, code, __VA_ARGS__)

static void *allocate(size_t bytes) {
    size_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, rounded);
    if (memory) memset(memory, 0, rounded);
    return memory;
}

/* ---- threads ---- */

struct pool {
    int threads;
    pthread_t workers[THREADS + 1];
    struct place { struct pool *pool; int thread; } places[THREADS + 1];
    struct { kiln_task task; void *ctx; int64_t n, grain; } loop;
    /* The number of the loop; the workers that have not finished it; those that sleep until the next. */
    atomic_long generation;
    atomic_int pending, sleeping, ending;
    pthread_mutex_t mutex;
    pthread_cond_t next;
};

static _Thread_local int inside;

static void piece(struct pool *pool, int thread) {
    inside = 1;
    int64_t grains = (pool->loop.n + pool->loop.grain - 1) / pool->loop.grain;
    int64_t begin = grains * thread / pool->threads * pool->loop.grain;
    int64_t end = grains * (thread + 1) / pool->threads * pool->loop.grain;
    if (end > pool->loop.n) end = pool->loop.n;
    if (begin < end) pool->loop.task(pool->loop.ctx, begin, end, thread);
    inside = 0;
}

/* A worker spins for some microseconds before it sleeps: loops follow each other closely within a step. */
#define ROUNDS 20000

static void await_loop(struct pool *pool, long seen) {
    for (int round = 0; round < ROUNDS; round++)
        if (atomic_load(&pool->generation) != seen) return;
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleeping, 1);
    while (atomic_load(&pool->generation) == seen) pthread_cond_wait(&pool->next, &pool->mutex);
    atomic_fetch_sub(&pool->sleeping, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void wake(struct pool *pool) {
    atomic_fetch_add(&pool->generation, 1);
    if (!atomic_load(&pool->sleeping)) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->next);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker(void *given) {
    struct place *place = given;
    for (long seen = 0;; seen++) {
        await_loop(place->pool, seen);
        if (atomic_load(&place->pool->ending)) return NULL;
        piece(place->pool, place->thread);
        atomic_fetch_sub(&place->pool->pending, 1);
    }
}

static void parallel_for(void *given, int64_t n, int64_t grain, kiln_task task, void *ctx) {
    struct pool *pool = given;
    if (n <= 0) return;
    if (pool->threads == 1 || inside || n <= grain) {
        task(ctx, 0, n, 0);
        return;
    }
    pool->loop.task = task, pool->loop.ctx = ctx, pool->loop.n = n, pool->loop.grain = grain;
    atomic_store(&pool->pending, pool->threads - 1);
    wake(pool);
    piece(pool, 0);
    while (atomic_load(&pool->pending)) {}
}

static void end_pool(struct pool *pool) {
    if (!pool) return;
    atomic_store(&pool->ending, 1);
    wake(pool);
    for (int thread = 1; thread < pool->threads; thread++) pthread_join(pool->workers[thread], NULL);
    pthread_cond_destroy(&pool->next);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

static struct pool *begin_pool(int threads) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = 1;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->next, NULL);
    for (int thread = 1; thread < threads && thread < THREADS; thread++) {
        pool->places[thread] = (struct place){pool, thread};
        if (pthread_create(&pool->workers[thread], NULL, worker, &pool->places[thread])) break;
        pool->threads = thread + 1;
    }
    return pool;
}

/* An exported step calls nothing outside. */
static int call_extern(void *pool, int index, void **buffers) {
    (void)pool, (void)index, (void)buffers;
    return 1;
}

/* ---- safetensors ---- */

/* A reader of JSON that knows where it is; `at` is NULL after a fault. */
struct reader { const char *at, *end; };

static void skip_space(struct reader *r) {
    while (r->at && r->at < r->end && strchr(" \t\r\n", *r->at)) r->at++;
}

static int take(struct reader *r, char wanted) {
    skip_space(r);
    if (!r->at || r->at >= r->end || *r->at != wanted) return 0;
    r->at++;
    return 1;
}

static void demand(struct reader *r, char wanted) {
    if (!take(r, wanted)) r->at = NULL;
}

/* A string without its quotes, escapes as they are written. */
static struct reader string(struct reader *r) {
    demand(r, '"');
    struct reader text = *r;
    while (r->at && r->at < r->end && *r->at != '"') r->at += *r->at == '\\' ? 2 : 1;
    text.end = r->at;
    demand(r, '"');
    return text;
}

static int is(struct reader text, const char *word) {
    size_t length = strlen(word);
    return text.at && text.end && (size_t)(text.end - text.at) == length && !memcmp(text.at, word, length);
}

static uint64_t whole(struct reader *r) {
    uint64_t number = 0;
    skip_space(r);
    if (!r->at || r->at >= r->end || *r->at < '0' || *r->at > '9') {
        r->at = NULL;
        return 0;
    }
    while (r->at < r->end && *r->at >= '0' && *r->at <= '9') number = number * 10 + (uint64_t)(*r->at++ - '0');
    return number;
}

/* A list of whole numbers, written as `[1,2]` into `text`, and the last two of them. */
static void list(struct reader *r, char *text, size_t size, uint64_t last[2]) {
    size_t used = 1;
    last[0] = last[1] = 0;
    text[0] = '[';
    demand(r, '[');
    for (int count = 0; r->at && !take(r, ']'); count++) {
        if (count) demand(r, ',');
        uint64_t number = whole(r);
        last[0] = last[1], last[1] = number;
        int written = snprintf(text + used, size - used, count ? ",%llu" : "%llu", (unsigned long long)number);
        if (written < 0 || used + (size_t)written + 2 > size) r->at = NULL;
        else used += (size_t)written;
    }
    text[used] = ']', text[used + 1] = 0;
}

/* What a file says of one tensor. */
struct entry { struct reader type; char shape[256]; uint64_t begin, end; };

static struct entry read_entry(struct reader *r) {
    struct entry entry = {.shape = ""};
    char ignored[256];
    uint64_t last[2];
    demand(r, '{');
    for (int count = 0; r->at && !take(r, '}'); count++) {
        if (count) demand(r, ',');
        struct reader key = string(r);
        demand(r, ':');
        if (is(key, "dtype")) entry.type = string(r);
        else if (is(key, "shape")) list(r, entry.shape, sizeof entry.shape, last);
        else if (is(key, "data_offsets")) {
            list(r, ignored, sizeof ignored, last);
            entry.begin = last[0], entry.end = last[1];
        } else r->at = NULL;
    }
    return entry;
}

static uint64_t digits(struct reader text) {
    return whole(&text);
}

static void read_metadata(kiln_session *session, struct reader *r) {
    demand(r, '{');
    for (int count = 0; r->at && !take(r, '}'); count++) {
        if (count) demand(r, ',');
        struct reader key = string(r);
        demand(r, ':');
        struct reader value = string(r);
        if (is(key, "step")) session->steps = digits(value);
        if (is(key, "seed")) session->seed = digits(value);
        if (is(key, "stream")) session->stream = digits(value);
    }
}

/* Reads the header `text` and copies the tensors that follow it in `file`. */
static int read_states(kiln_session *session, FILE *file, const char *path, struct reader r, uint64_t start) {
    char found[STATES + 1] = {0};
    demand(&r, '{');
    for (int count = 0; r.at && !take(&r, '}'); count++) {
        if (count) demand(&r, ',');
        struct reader name = string(&r);
        demand(&r, ':');
        if (is(name, "__metadata__")) {
            read_metadata(session, &r);
            continue;
        }
        struct entry entry = read_entry(&r);
        int state = 0;
        while (r.at && state < STATES && !is(name, states[state].name)) state++;
        if (!r.at || state == STATES) continue;
        const struct tensor *wanted = &states[state];
        if (!is(entry.type, wanted->type) || strcmp(entry.shape, wanted->shape) || entry.end - entry.begin != wanted->bytes)
            return FAIL(session, KILN_STATE, "%s: `%s` is %.*s%s; this step has %s%s", path, wanted->name,
                        (int)(entry.type.end - entry.type.at), entry.type.at, entry.shape, wanted->type, wanted->shape);
        if (fseeko(file, (off_t)(start + entry.begin), SEEK_SET) ||
            fread(session->states[state], 1, wanted->bytes, file) != wanted->bytes)
            return FAIL(session, KILN_STATE, "%s ends within `%s`: copy it again, or take an older one", path, wanted->name);
        found[state] = 1;
    }
    if (!r.at) return FAIL(session, KILN_STATE, "%s is not a safetensors file: its header cannot be read", path);
    for (int state = 0; state < STATES; state++)
        if (!found[state]) return FAIL(session, KILN_STATE, "%s has no `%s`: it is of another step", path, states[state].name);
    return KILN_DONE;
}

/* More bytes than a header has. */
#define HEADER ((uint64_t)100 << 20)

static int load(kiln_session *session, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return FAIL(session, KILN_STATE, "%s cannot be opened", path);
    unsigned char head[8];
    uint64_t length = 0;
    int code = KILN_STATE;
    char *text = NULL;
    if (fread(head, 1, 8, file) == 8)
        for (int i = 7; i >= 0; i--) length = length << 8 | head[i];
    if (length == 0 || length > HEADER || !(text = malloc(length + 1)) || fread(text, 1, length, file) != length)
        FAIL(session, KILN_STATE, "%s is not a safetensors file", path);
    else {
        text[length] = 0;
        code = read_states(session, file, path, (struct reader){text, text + length}, 8 + length);
    }
    free(text);
    fclose(file);
    return code;
}

static int write_states(kiln_session *session, FILE *file) {
    size_t size = 256, used = 0;
    for (int state = 0; state < STATES; state++) size += strlen(states[state].name) + strlen(states[state].shape) + 128;
    char *text = malloc(size);
    if (!text) return 0;
    used += (size_t)sprintf(text, "{\"__metadata__\":{\"step\":\"%llu\",\"seed\":\"%llu\",\"stream\":\"%llu\"}",
                            (unsigned long long)session->steps, (unsigned long long)session->seed,
                            (unsigned long long)session->stream);
    unsigned long long at = 0;
    for (int state = 0; state < STATES; state++) {
        const struct tensor *it = &states[state];
        used += (size_t)sprintf(text + used, ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}", it->name,
                                it->type, it->shape, at, at + it->bytes);
        at += it->bytes;
    }
    used += (size_t)sprintf(text + used, "}");
    while (used % 8) text[used++] = ' ';
    unsigned char head[8];
    for (int i = 0; i < 8; i++) head[i] = (unsigned char)((uint64_t)used >> 8 * i);
    int done = fwrite(head, 1, 8, file) == 8 && fwrite(text, 1, used, file) == used;
    free(text);
    for (int state = 0; state < STATES && done; state++)
        done = fwrite(session->states[state], 1, states[state].bytes, file) == states[state].bytes;
    return done && !fflush(file) && !fsync(fileno(file));
}

PUBLIC int kiln_save(kiln_session *session, const char *path) {
    char *beside = malloc(strlen(path) + 16);
    if (!beside) return FAIL(session, KILN_MEMORY, "no memory for a file's name");
    sprintf(beside, "%s.part", path);
    FILE *file = fopen(beside, "wb");
    int done = file && write_states(session, file);
    if (file && fclose(file)) done = 0;
    if (done) done = !rename(beside, path);
    else if (file) remove(beside);
    free(beside);
    return done ? KILN_DONE : FAIL(session, KILN_WRITE, "%s cannot be written: is the disk full, or the folder not yours?", path);
}

/* ---- sessions ---- */

static int prepare(kiln_session *session, const char *state, int threads) {
    for (int i = 0; i < STATES; i++)
        if (!(session->states[i] = allocate(states[i].bytes))) return FAIL(session, KILN_MEMORY, "no memory for the state");
    for (int i = 0; i < OUTPUTS; i++)
        if (outputs[i].alias < 0 && !(session->spare[i] = allocate(outputs[i].bytes)))
            return FAIL(session, KILN_MEMORY, "no memory for the outputs");
    for (int i = 0; i < ARGUMENTS; i++)
        if ((arguments[i].from == SOURCE_INPUT || arguments[i].copied) && !(session->staged[i] = allocate(arguments[i].bytes)))
            return FAIL(session, KILN_MEMORY, "no memory for the inputs");
    if (!(session->arena = allocate(ARENA))) return FAIL(session, KILN_MEMORY, "no memory for intermediate values");
    if (!(session->pool = begin_pool(threads))) return FAIL(session, KILN_MEMORY, "no memory for threads");
    session->steps = FIRST_STEP, session->seed = SEED, session->stream = STREAM;
    if (state) return load(session, state);
    return STATES ? FAIL(session, KILN_STATE, "this step has a state: give the file state.safetensors") : KILN_DONE;
}

static kiln_session *open_here(const char *state, int threads, char *message, size_t size) {
    kiln_session *session = calloc(1, sizeof *session);
    if (!session) {
        fail(message, size, KILN_MEMORY, "no memory for a session");
        return NULL;
    }
    if (prepare(session, state, threads)) {
        fail(message, size, KILN_STATE, "%s", session->message);
        kiln_close(session);
        return NULL;
    }
    return session;
}

PUBLIC ANY_PROCESSOR kiln_session *kiln_open(const char *state, int threads, char *message, size_t size) {
    char missing[1024] = "";
    missing_features(missing);
    if (missing[0]) {
        /* Not by `fail`, which is compiled for the other processor. */
        if (message && size) snprintf(message, size, "this step was compiled for a processor with%s, which this one lacks: export it on this machine", missing);
        return NULL;
    }
    return open_here(state, threads, message, size);
}

PUBLIC void kiln_close(kiln_session *session) {
    if (!session) return;
    end_pool(session->pool);
    for (int i = 0; i < STATES; i++) free(session->states[i]);
    for (int i = 0; i < OUTPUTS; i++) free(session->spare[i]);
    for (int i = 0; i < ARGUMENTS; i++) free(session->staged[i]);
    for (int i = 0; i < RESULTS; i++) free(session->kept[i]);
    free(session->arena);
    free(session);
}

PUBLIC uint64_t kiln_steps(const kiln_session *session) { return session->steps; }

PUBLIC const void *kiln_state(const kiln_session *session, int index) {
    return index >= 0 && index < STATES ? session->states[index] : NULL;
}

PUBLIC const char *kiln_message(const kiln_session *session) { return session->message; }

/* ---- a run ---- */

static int make_numbers(kiln_session *session, double rate, uint64_t *bits) {
    uint64_t at = session->steps - FIRST_STEP;
    if (FIXED_RATE && rate != RATE)
        return FAIL(session, KILN_NUMBERS, "the optimizer's numbers were exported for the learning rate %.17g, and this call has %.17g", RATE, rate);
    for (int i = 0; i < NUMBERS; i++) {
        const struct number *it = &numbers[i];
        switch (it->is) {
        case NUMBER_FIXED: bits[i] = it->bits; break;
        case NUMBER_SEED: bits[i] = session->seed; break;
        case NUMBER_STREAM: bits[i] = session->stream + (uint64_t)it->index; break;
        case NUMBER_RATE: {
            double value = it->offset + it->factor * rate;
            if (!it->wide) value = (double)(float)value;
            memcpy(&bits[i], &value, sizeof value);
            break;
        }
        case NUMBER_TABLE: {
            const struct table *table = &tables[it->index];
            if (session->steps < FIRST_STEP || (at >= table->length && !table->settles))
                return FAIL(session, KILN_NUMBERS, "the optimizer's numbers of step %llu were not exported", (unsigned long long)session->steps + 1);
            bits[i] = table->bits[at < table->length ? at : table->length - 1];
            break;
        }
        }
    }
    return KILN_DONE;
}

static int64_t integer(const char *type, const void *at) {
    switch (type[0] == 'u' ? -atoi(type + 1) : atoi(type + 1)) {
    case 8: return *(const int8_t *)at;
    case 16: return *(const int16_t *)at;
    case 32: return *(const int32_t *)at;
    case -8: return *(const uint8_t *)at;
    case -16: return *(const uint16_t *)at;
    case -32: return *(const uint32_t *)at;
    default: return *(const int64_t *)at;
    }
}

/* Whether `memory` is that of a state. */
static int is_state(const kiln_session *session, const void *memory) {
    for (int state = 0; state < STATES; state++)
        if (session->states[state] == memory) return 1;
    return 0;
}

/* Gives `slot` other memory if its own became a state: memory of `before`, the former states, that is no state any more; NULL if there is none. */
static void refill(const kiln_session *session, void **slot, size_t bytes, void **before) {
    if (!*slot || !is_state(session, *slot)) return;
    *slot = NULL;
    for (int state = 0; state < STATES && !*slot; state++)
        if (before[state] && states[state].bytes >= bytes && !is_state(session, before[state])) *slot = before[state], before[state] = NULL;
}

/* The new state is what the outputs say. */
static void move_on(kiln_session *session, void *const *made) {
    void *before[STATES + 1];
    memcpy(before, session->states, sizeof before);
    for (int i = 0; i < OUTPUTS; i++)
        if (outputs[i].to == GOAL_STATE) session->states[outputs[i].index] = made[i];
    for (int i = 0; i < OUTPUTS; i++) refill(session, &session->spare[i], outputs[i].bytes, before);
    for (int i = 0; i < ARGUMENTS; i++) refill(session, &session->staged[i], arguments[i].bytes, before);
    for (int state = 0; state < STATES; state++)
        if (before[state] && before[state] != session->states[state] && !is_state(session, before[state])) free(before[state]);
}

static int overlap(const void *one, size_t bytes, const void *other, size_t others) {
    uintptr_t a = (uintptr_t)one, b = (uintptr_t)other;
    return one && other && a < b + others && b < a + bytes;
}

/* Whether the step may write into this memory while it reads: it is that of a state, which a caller has from kiln_state, or was that of one. */
static int is_written(const kiln_session *session, const void *memory, size_t bytes) {
    for (int i = 0; i < STATES; i++)
        if (overlap(memory, bytes, session->states[i], states[i].bytes)) return 1;
    for (int i = 0; i < OUTPUTS; i++)
        if (overlap(memory, bytes, session->spare[i], outputs[i].bytes)) return 1;
    return 0;
}

/* Where the step reads argument `i`; NULL if there is no memory for a copy. */
static void *place(kiln_session *session, int i, const void *const *inputs) {
    const struct argument *it = &arguments[i];
    const void *given = it->from == SOURCE_INPUT ? inputs[it->index] : session->states[it->index];
    int own = it->from == SOURCE_INPUT && is_written(session, given, it->bytes);
    if (!it->copied && !own && (uintptr_t)given % ALIGNMENT == 0) return (void *)given;
    if (!session->staged[i] && !(session->staged[i] = allocate(it->bytes))) return NULL;
    return memmove(session->staged[i], given, it->bytes);
}

/* What result `i` is, a state or an input: a copy if the step or another result is written there; NULL if there is no memory for one. */
static const void *pass(kiln_session *session, int i, const void *const *inputs, void *const *results) {
    size_t bytes = taken[i].bytes;
    const void *given = taken[i].from == TAKEN_INPUT ? inputs[taken[i].index] : session->states[taken[i].index];
    int written = is_written(session, given, bytes);
    for (int j = 0; j < RESULTS; j++) written |= j != i && overlap(results[j], taken[j].bytes, given, bytes);
    if (!written) return given;
    if (!session->kept[i] && !(session->kept[i] = allocate(bytes))) return NULL;
    return memcpy(session->kept[i], given, bytes);
}

PUBLIC int kiln_run(kiln_session *session, double learning_rate, const void *const *inputs, void *const *results) {
    uint64_t bits[NUMBERS + 1];
    void *in[ARGUMENTS + 1], *out[OUTPUTS + 2 * CHECKS + 1];
    _Alignas(ALIGNMENT) char extremes[2 * CHECKS + 1][ALIGNMENT];
    int code = make_numbers(session, learning_rate, bits);
    if (code) return code;
    for (int i = 0; i < ARGUMENTS; i++)
        if (!(in[i] = place(session, i, inputs))) return FAIL(session, KILN_MEMORY, "no memory for the inputs");
    for (int i = 0; i < OUTPUTS; i++) {
        if (outputs[i].alias >= 0) out[i] = in[outputs[i].alias];
        else if (!(out[i] = session->spare[i]) && !(out[i] = session->spare[i] = allocate(outputs[i].bytes)))
            return FAIL(session, KILN_MEMORY, "no memory for the outputs");
    }
    /* The results are written after the step, because they may lie in the memory of its inputs. */
    const void *passed[RESULTS + 1];
    for (int i = 0; i < RESULTS; i++)
        if (taken[i].from != TAKEN_OUTPUT && !(passed[i] = pass(session, i, inputs, results)))
            return FAIL(session, KILN_MEMORY, "no memory for the results");
    for (int i = 0; i < 2 * CHECKS; i++) out[OUTPUTS + i] = extremes[i];
    kiln_runtime runtime = {session->pool, parallel_for, session->pool->threads, NULL, call_extern};
    int found = kiln_step(&runtime, (void *const *)in, out, session->arena, bits);
    if (found < 0) {
        const struct check *check = &checks[-found - 1];
        long long least = integer(check->type, extremes[-2 * (found + 1)]), most = integer(check->type, extremes[-2 * (found + 1) + 1]);
        return FAIL(session, KILN_INDEX, "an index is out of range: %lld where %llu is the extent, in %s", least < 0 ? least : most,
                    (unsigned long long)check->extent, check->where);
    }
    if (found) return FAIL(session, KILN_STATE, "the step calls an operation that is not part of it");
    for (int i = 0; i < RESULTS; i++) memmove(results[i], taken[i].from == TAKEN_OUTPUT ? out[taken[i].index] : passed[i], taken[i].bytes);
    move_on(session, out);
    session->steps++;
    session->stream += STREAMS;
    return KILN_DONE;
}
