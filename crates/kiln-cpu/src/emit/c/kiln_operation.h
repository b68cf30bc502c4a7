/* What an operation of the program's own is given. */
#ifndef KILN_OPERATION_H
#define KILN_OPERATION_H

#include <stddef.h>
#include <stdint.h>

/* A tensor: its elements, row-major, of the C type of their width (16-bit floats are uint16_t, bools uint8_t). */
typedef struct kiln_tensor {
    void *data;
    int64_t elements;
    int64_t rank;
    const int64_t *shape;
} kiln_tensor;

#endif
