/* A compiled step with its state: trains (or computes) without Kiln, Rust or a compiler.
 *
 *     char message[256];
 *     kiln_session *session = kiln_open("state.safetensors", 2, message, sizeof message);
 *     const void *inputs[KILN_INPUTS] = {images, labels};
 *     void *results[KILN_RESULTS] = {&loss};
 *     if (kiln_run(session, 1e-3, inputs, results)) puts(kiln_message(session));
 *     kiln_save(session, "state.safetensors");
 *     kiln_close(session);
 *
 * manifest.json says what the tensors are. All are row-major, in the byte order of the machine. One session is used by one thread at a time.
 */
#ifndef KILN_STEP_H
#define KILN_STEP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kiln_session kiln_session;

/* What a call returns, other than KILN_DONE, leaves the state as it was. kiln_message says more. */
enum {
    KILN_DONE = 0,
    /* An index of the input is out of range. */
    KILN_INDEX = 1,
    /* The state cannot be read, or is of another step. */
    KILN_STATE = 2,
    /* A file cannot be written. */
    KILN_WRITE = 3,
    /* The optimizer's numbers end here: the manifest's `steps`. Or the learning rate is another than the one that the manifest fixes. */
    KILN_NUMBERS = 4,
    /* There is not enough memory. */
    KILN_MEMORY = 5
};

/* Loads the state of a file that was exported or saved; with NULL the state is all zeros, for steps that have none. `threads` is at least 1; more than
 * the step was compiled for (the manifest's `threads`) count as that many. NULL if that fails, with the reason in `message` (of `size` bytes). An x86-64
 * processor that lacks instructions of the step is refused; on others nothing is checked, so run it on such a one as it was exported on. */
kiln_session *kiln_open(const char *state, int threads, char *message, size_t size);

/* Runs the step once: reads the inputs, writes the results and moves the state on. An input may be what kiln_state returns, and a result may lie in the
 * memory of an input. Results must not lie in each other's memory, nor in that of a state. */
int kiln_run(kiln_session *session, double learning_rate, const void *const *inputs, void *const *results);

/* How many steps were run, those before the export included. */
uint64_t kiln_steps(const kiln_session *session);

/* The elements of state `index`, as they are until the next run; NULL if there is no such state. */
const void *kiln_state(const kiln_session *session, int index);

/* Writes the state to a safetensors file that kiln_open takes. An existing file is replaced when all is written. */
int kiln_save(kiln_session *session, const char *path);

/* What the last call that did not return KILN_DONE found. */
const char *kiln_message(const kiln_session *session);

/* Ends the session. */
void kiln_close(kiln_session *session);

#ifdef __cplusplus
}
#endif

#endif
