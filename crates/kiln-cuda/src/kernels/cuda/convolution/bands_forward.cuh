// A convolution of pictures: a group of four warps computes 64 neighbouring results of a row at a time.

// Elements between rows of results that wait to be stored: lanes that write eight rows find them in different banks.
constexpr int PITCH = OUT + 8, TILES = (RESULT2 + 63) / 64;

// sum = the windows that begin at `band`, times the packed weight.
#ifdef KILN_HOST

inline void multiply(float (&sum)[OUT / 8][4], const T* band, const T* weight)
{
    const int row = warp_in_group() * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int n = 0; n < OUT / 8; n++)
        for (int i = 0; i < 4; i++) {
            float total = 0;
            for (int tap = 0; tap < WINDOW1; tap++)
                for (int k = 0; k < DEPTH; k++) {
                    const T left = band[tap * DILATION1 * LINE + (row + i / 2 * 8) * 8 + k];
                    const int piece = (tap * DEPTH + k) / 8;
                    total += widen(left) * widen(weight[(piece * OUT + 8 * n + column + i % 2) * 8 + k % 8]);
                }
            sum[n][i] = total;
        }
}

#else

inline void multiply(float (&sum)[OUT / 8][4], const T* band, const T* weight)
{
    const kiln_u64 left = operand(band, 16, 128), right = operand(weight, OUT * 16, 128);
    kiln_group_begin();
    #pragma unroll
    for (int tap = 0; tap < WINDOW1; tap++)
        #pragma unroll
        for (int k = 0; k < DEPTH; k += 16)
            multiply_group(
                sum, left + (tap * DILATION1 * LINE + k) * 2 / 16, right + (tap * DEPTH + k) / 8 * OUT, tap + k > 0);
    kiln_group_commit();
    wait_for_products();
    settle(sum);
}

#endif

inline void run(const T* __restrict__ picture, const T* __restrict__ weight, O* __restrict__ result)
{
    T* weights = (T*)kiln_dynamic_shared();
    T* band = weights + PIECES * 8 * OUT;
    T* own = band + BAND_ELEMENTS + threadIdx.x / 32 * 16 * PITCH;
    const int image = blockIdx.x / BANDS, first = blockIdx.x % BANDS * BAND;
    for (int number = threadIdx.x; number < OUT * PIECES; number += THREADS) {
        const int channel = number % OUT, piece = number / OUT;
        *(uint4*)(weights + number * 8) = *(const uint4*)(weight + (channel * PIECES + piece) * 8);
    }
    load_band(picture + image * X_IMAGE, first * STRIDE1 - LOW1, band);
    landed();
    __syncthreads();
    const int lane = threadIdx.x % 32;
    result += image * Y_IMAGE;
    for (int part = group_of_warps(); part < BAND * TILES; part += THREADS / 128) {
        const int line = part / TILES, i1 = first + line, tile = part % TILES * 64;
        if (i1 >= RESULT1) break;
        float sum[OUT / 8][4];
        multiply(sum, band + line * STRIDE1 * LINE + tile * 8, weights);
        #pragma unroll
        for (int n = 0; n < OUT / 8; n++)
            #pragma unroll
            for (int half = 0; half < 2; half++)
                *(kiln_u32*)(own + (lane / 4 + 8 * half) * PITCH + 8 * n + lane % 4 * 2) = kiln_pack<O>(sum[n][2 * half], sum[n][2 * half + 1]);
        __syncwarp();
        #pragma unroll
        for (int number = lane; number < 16 * (OUT / 8); number += 32) {
            const int row = number / (OUT / 8), channel = number % (OUT / 8) * 8, i2 = tile + warp_in_group() * 16 + row;
            if (i2 < RESULT2) *(uint4*)(result + i1 * Y1 + i2 * Y2 + channel) = *(const uint4*)(own + row * PITCH + channel);
        }
        __syncwarp();
    }
}
