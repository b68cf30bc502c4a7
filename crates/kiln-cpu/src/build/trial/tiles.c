/* Multiplies tiles of AMX and compares with whole numbers. Ends with 0 if they are right, with 1 if the operating system refuses them, and
 * with 2 if they are wrong. */
#define KILN_LANES 16
#define KILN_FMA 1
#include "kiln_vector.h"

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
/* ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA. */
static int refused(void) { return syscall(SYS_arch_prctl, 0x1023, 18) != 0; }
#else
static int refused(void) { return 0; }
#endif

static uint16_t bf16(int x) {
    float f = (float)x;
    uint32_t bits;
    __builtin_memcpy(&bits, &f, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* Rows of A and B are `PITCH` pairs apart, those of C as many floats. */
enum { PITCH = 19 };
static uint16_t a[16][2 * PITCH], b[16][2 * PITCH];
static float c[16][PITCH];

int main(void) {
    if (refused()) return 1;
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 32; k++) {
            a[i][k] = bf16((i * 5 + k * 3) % 11 - 5);
            b[i][k] = bf16((i * 7 + k * 2) % 13 - 6);
            if (k < 16) c[i][k] = (float)(i - k);
        }
    kiln_tiles_begin();
    kiln_tile_load(0, c, PITCH);
    kiln_tile_load(4, a, PITCH);
    kiln_tile_load(7, b, PITCH);
    kiln_tile_dot(0, 4, 7);
    kiln_tile_zero(3);
    kiln_tile_dot(3, 4, 7);
    float zero[16][16];
    kiln_tile_store(3, zero, 16);
    kiln_tile_store(0, c, PITCH);
    kiln_tiles_end();
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            int sum = 0;
            for (int k = 0; k < 32; k++) {
                int x = (i * 5 + k * 3) % 11 - 5, y = ((k / 2) * 7 + (2 * j + k % 2) * 2) % 13 - 6;
                sum += x * y;
            }
            if (zero[i][j] != (float)sum || c[i][j] != (float)(sum + i - j)) return 2;
        }
    return 0;
}
