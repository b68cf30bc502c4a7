/* Trains an exported step on batches from a file and saves its state: train STATE BATCHES CALLS RATE THREADS SAVED.
 *
 * The file has the bytes of the inputs of each call, one after the other; their sizes are the first KILN_INPUTS numbers of eight bytes. Prints the first result of
 * each call as the bits of a float.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"

static void stop(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

int main(int count, char **words) {
    if (count != 7) stop("train STATE BATCHES CALLS RATE THREADS SAVED");
    char message[512];
    kiln_session *session = kiln_open(words[1], atoi(words[5]), message, sizeof message);
    if (!session) stop(message);
    FILE *file = fopen(words[2], "rb");
    if (!file) stop("no batches");
    uint64_t bytes[KILN_INPUTS];
    if (fread(bytes, 8, KILN_INPUTS, file) != KILN_INPUTS) stop("the batches end");
    void *inputs[KILN_INPUTS], *results[KILN_RESULTS];
    for (int i = 0; i < KILN_INPUTS; i++) inputs[i] = malloc(bytes[i]);
    for (int i = 0; i < KILN_RESULTS; i++) results[i] = calloc(1, 1 << 16);
    for (int call = 0; call < atoi(words[3]); call++) {
        for (int i = 0; i < KILN_INPUTS; i++)
            if (fread(inputs[i], 1, bytes[i], file) != bytes[i]) stop("the batches end");
        if (kiln_run(session, atof(words[4]), (const void *const *)inputs, results)) stop(kiln_message(session));
        uint32_t bits;
        memcpy(&bits, results[0], 4);
        printf("%u\n", bits);
    }
    if (kiln_save(session, words[6])) stop(kiln_message(session));
    for (int i = 0; i < KILN_INPUTS; i++) free(inputs[i]);
    for (int i = 0; i < KILN_RESULTS; i++) free(results[i]);
    fclose(file);
    kiln_close(session);
    return 0;
}
