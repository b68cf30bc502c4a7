/* The interface of MPI 5 over Open MPI's: what a libmpi_abi.so does, for the functions that Kiln calls. The numbers of
   predefined objects are those of the MPI Forum's header for the standard interface. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

enum { COMM_WORLD = 0x101, ERRORS_RETURN = 0x142, BYTE = 0x247, FUNNELED = 1024 };

static void *symbol(const char *name) {
    static void *library;
    if (!library) library = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
    return library ? dlsym(library, name) : NULL;
}

static void *object(void *standard) {
    switch ((uintptr_t)standard) {
    case COMM_WORLD: return symbol("ompi_mpi_comm_world");
    case ERRORS_RETURN: return symbol("ompi_mpi_errors_return");
    case BYTE: return symbol("ompi_mpi_byte");
    default: return NULL; /* a wrong number must not work */
    }
}

int MPI_Abi_get_version(int *major, int *minor) {
    *major = 1;
    *minor = 0;
    return 0;
}

int MPI_Init_thread(int *count, char ***arguments, int required, int *provided) {
    int (*own)(int *, char ***, int, int *) = symbol("MPI_Init_thread");
    if (required != FUNNELED) return 13;
    int result = own(count, arguments, 1, provided);
    *provided = FUNNELED;
    return result;
}

int MPI_Initialized(int *flag) { return ((int (*)(int *))symbol("MPI_Initialized"))(flag); }
int MPI_Finalize(void) { return ((int (*)(void))symbol("MPI_Finalize"))(); }

int MPI_Comm_rank(void *comm, int *rank) {
    return ((int (*)(void *, int *))symbol("MPI_Comm_rank"))(object(comm), rank);
}

int MPI_Comm_size(void *comm, int *size) {
    return ((int (*)(void *, int *))symbol("MPI_Comm_size"))(object(comm), size);
}

int MPI_Comm_set_errhandler(void *comm, void *handler) {
    return ((int (*)(void *, void *))symbol("MPI_Comm_set_errhandler"))(object(comm), object(handler));
}

int MPI_Isend(const void *from, int count, void *type, int to, int tag, void *comm, void **request) {
    int (*own)(const void *, int, void *, int, int, void *, void **) = symbol("MPI_Isend");
    return own(from, count, object(type), to, tag, object(comm), request);
}

int MPI_Irecv(void *to, int count, void *type, int from, int tag, void *comm, void **request) {
    int (*own)(void *, int, void *, int, int, void *, void **) = symbol("MPI_Irecv");
    return own(to, count, object(type), from, tag, object(comm), request);
}

int MPI_Test(void **request, int *flag, void *status) {
    /* Both statuses have room for either library's. */
    return ((int (*)(void **, int *, void *))symbol("MPI_Test"))(request, flag, status);
}

int MPI_Error_string(int code, char *text, int *length) {
    return ((int (*)(int, char *, int *))symbol("MPI_Error_string"))(code, text, length);
}
