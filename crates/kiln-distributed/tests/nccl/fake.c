/* A libnccl.so.2 without a GPU: it writes each call to the file that FAKE_NCCL_LOG names, and fails where
   FAKE_NCCL_FAIL says so: the name of a function, or "later" for an error that ncclCommGetAsyncError tells. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int rank, size; } *ncclComm_t;

static int note(const char *function, const char *text) {
    const char *path = getenv("FAKE_NCCL_LOG");
    const char *fails = getenv("FAKE_NCCL_FAIL");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s%s\n", function, text);
        fclose(log);
    }
    return fails && strcmp(fails, function) == 0 ? 5 : 0;
}

int ncclGetVersion(int *version) {
    const char *text = getenv("FAKE_NCCL_VERSION");
    *version = text ? atoi(text) : 22809;
    return 0;
}

int ncclGetUniqueId(ncclUniqueId *id) {
    for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 7 + 1);
    return note("ncclGetUniqueId", "");
}

int ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    char text[64];
    int known = 1;
    for (int i = 0; i < 128; i++) known &= id.internal[i] == (char)(i * 7 + 1);
    snprintf(text, sizeof text, " rank %d of %d, id %s", rank, size, known ? "known" : "unknown");
    *comm = malloc(sizeof **comm);
    (*comm)->rank = rank;
    (*comm)->size = size;
    return note("ncclCommInitRank", text);
}

int ncclCommDestroy(ncclComm_t comm) { free(comm); return note("ncclCommDestroy", ""); }
int ncclCommAbort(ncclComm_t comm) { free(comm); return note("ncclCommAbort", ""); }

int ncclCommGetAsyncError(ncclComm_t comm, int *state) {
    const char *fails = getenv("FAKE_NCCL_FAIL");
    (void)comm;
    *state = fails && strcmp(fails, "later") == 0 ? 6 : fails && strcmp(fails, "busy") == 0 ? 7 : 0;
    return note("ncclCommGetAsyncError", "");
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, ncclComm_t comm, void *stream) {
    char text[128];
    snprintf(text, sizeof text, " %p -> %p, %zu of type %d, op %d, rank %d, stream %p", from, to, count, type, op,
             comm->rank, stream);
    return note("ncclAllReduce", text);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, ncclComm_t comm, void *stream) {
    char text[128];
    snprintf(text, sizeof text, " %p -> %p, %zu of type %d, op %d, rank %d, stream %p", from, to, count, type, op,
             comm->rank, stream);
    return note("ncclReduceScatter", text);
}

int ncclAllGather(const void *from, void *to, size_t count, int type, ncclComm_t comm, void *stream) {
    char text[128];
    snprintf(text, sizeof text, " %p -> %p, %zu of type %d, rank %d, stream %p", from, to, count, type, comm->rank,
             stream);
    return note("ncclAllGather", text);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, ncclComm_t comm, void *stream) {
    char text[128];
    snprintf(text, sizeof text, " %p -> %p, %zu of type %d, root %d, rank %d, stream %p", from, to, count, type, root,
             comm->rank, stream);
    return note("ncclBroadcast", text);
}

const char *ncclGetErrorString(int code) { return code == 6 ? "remote process exited" : "invalid usage"; }
#ifndef OLD
const char *ncclGetLastError(ncclComm_t comm) { (void)comm; return "the fake says why"; }
#endif
