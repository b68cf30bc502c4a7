// Bands of a picture in shared memory, for the instructions that Hopper has for a group of four warps (`wgmma`).
//
// A block has LINES rows of the picture, from which BAND rows of results are computed. A row has ROW places of four channels each, eight
// bytes, of which place LOW2 is the picture's first; from place REACH on they are zeros. The window of a result begins at an even place, 16
// bytes behind that of its neighbour, and meets DEPTH neighbouring elements in each of its WINDOW1 rows. That is how `wgmma` finds operands
// that are not exchanged among rows: eight rows of 16 bytes one behind the other, wherever the next 16 bytes of them are. Here these are 16
// bytes further on too, where the next row begins, so that windows overlap in shared memory as they do in the picture:
//
//     bytes       0      16      32      48      64
//     result 0    [ 0..8 )[ 8..16 )..             16-byte pieces of its depth
//     result 1           [ 0..8 )[ 8..16 )..
//
// Each thread of a group has sums as `multiply_fragments` of tensor.cuh leaves them: two neighbouring columns of each eight, in two rows of
// the sixteen of its warp.

constexpr int PIECES = WINDOW1 * DEPTH / 8, LINE = ROW * 4;
static_assert(STRIDE2 == 2 && DEPTH % 16 == 0, "windows do not begin at whole vectors");

inline int group_of_warps() { return threadIdx.x / 128; }

inline int warp_in_group() { return threadIdx.x / 32 % 4; }

// Copies the rows of the picture `image` from row `top` on. The copies are seen by products behind `landed` and a barrier.
inline void load_band(const T* __restrict__ image, int top, T* to)
{
    #pragma unroll 8
    for (int number = threadIdx.x; number < LINES * ROW; number += THREADS) {
        const int place = number % ROW, i1 = top + number / ROW, i2 = place - LOW2;
        const bool inside = (unsigned)i1 < IMAGE1 && (unsigned)i2 < IMAGE2 && place < REACH;
        const T* at = image + (inside ? i1 * X1 + i2 * X2 : 0);
        Four four = {};
        #pragma unroll
        for (int channel = 0; channel < X_CHANNELS; channel++)
            if (inside) four.at[channel] = at[channel * X_CHANNEL];
        *(Four*)(to + number * 4) = four;
    }
}

#ifdef KILN_HOST

inline void landed() {}

#else

// What this thread has stored is seen by the instructions of a group, behind the next barrier.
inline void landed() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An operand in shared memory: eight rows (of a turned operand: steps of the depth) of 16 bytes one behind the other, `along` bytes from
// there to the next eight elements of the depth, and `across` bytes to the next eight rows.
inline kiln_u64 operand(const T* at, int along, int across)
{
    const kiln_u32 address = kiln_address_in_shared(at);
    return (kiln_u64)(address >> 4 & 0x3fff) | (kiln_u64)(along >> 4) << 16 | (kiln_u64)(across >> 4) << 32;
}

// Waits for all products of this group, and ties sums to where they are known.
template <int N> void settle(float (&sum)[N][4])
{
    #pragma unroll
    for (int n = 0; n < N; n++)
        #pragma unroll
        for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sum[n][i]) :: "memory");
}

inline void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#endif
