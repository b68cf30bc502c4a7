// The gradient of the weight of a convolution of pictures. Pixels are the depth: a group of four warps has 64 channels of the gradient as the
// left operand, in registers, and the depths of the windows as a turned right one. Each block adds up the bands that are its own.

// Channels that a block has, and elements between pixels of them: lanes that read rows of neighbours find them in different banks.
constexpr int ALL = THREADS / 128 * 64, PITCH = ALL + 8;

// sum += pixels of the gradient from `own` on, times the windows that begin at `band`.
#ifdef KILN_HOST

inline void gather_pixels(float (&sum)[WINDOW1][DEPTH / 8][4], const T* own, const T* band)
{
    const int channel = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int tap = 0; tap < WINDOW1; tap++)
        for (int n = 0; n < DEPTH / 8; n++)
            for (int i = 0; i < 4; i++)
                for (int k = 0; k < 16 * TOGETHER; k++) {
                    const T left = own[k * PITCH + channel + i / 2 * 8];
                    sum[tap][n][i] += widen(left) * widen(band[tap * DILATION1 * LINE + k * 8 + 8 * n + column + i % 2]);
                }
}

#else

inline void gather_pixels(float (&sum)[WINDOW1][DEPTH / 8][4], const T* own, const T* band)
{
    // Lane 8 i + r says where row r of matrix i is: channels come in eights first.
    const int lane = threadIdx.x % 32, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    const T* from = own + (high + lane % 8) * PITCH + threadIdx.x / 32 * 16 + low;
    kiln_u32 left[TOGETHER][4];
    #pragma unroll
    for (int step = 0; step < TOGETHER; step++) {
        float words[4];
        load_transposed(words, from + 16 * step * PITCH);
        #pragma unroll
        for (int i = 0; i < 4; i++) left[step][i] = __float_as_uint(words[i]);
    }
    const kiln_u64 right = operand(band, 128, 16);
    kiln_group_begin();
    #pragma unroll
    for (int step = 0; step < TOGETHER; step++)
        #pragma unroll
        for (int tap = 0; tap < WINDOW1; tap++)
            gather_group(sum[tap], left[step], right + (tap * DILATION1 * LINE + 16 * step * 8) * 2 / 16, 1);
    kiln_group_commit();
    wait_for_products();
    #pragma unroll
    for (int tap = 0; tap < WINDOW1; tap++) settle(sum[tap]);
}

#endif

inline void run(const T* __restrict__ picture, const T* __restrict__ gradient, O* __restrict__, float* __restrict__ parts)
{
    T* band = (T*)kiln_dynamic_shared();
    T* own = band + BAND_ELEMENTS;
    float sum[WINDOW1][DEPTH / 8][4] = {};
    for (int item = blockIdx.x; item < IMAGES * BANDS; item += CHUNKS) {
        const int image = item / BANDS, first = item % BANDS * BAND;
        // Nobody writes before everybody has read what was there.
        __syncthreads();
        for (int number = threadIdx.x; number < BAND * WIDE * (ALL / 8); number += THREADS) {
            const int channel = number % (ALL / 8) * 8, pixel = number / (ALL / 8), i1 = first + pixel / WIDE, i2 = pixel % WIDE;
            const bool inside = i1 < RESULT1 && i2 < RESULT2 && channel < OUT;
            copy_vector(own + pixel * PITCH + channel, gradient + (inside ? image * G_IMAGE + i1 * G1 + i2 * G2 + channel : 0), inside);
        }
        end_of_copies();
        load_band(picture + image * X_IMAGE, first * STRIDE1 - LOW1, band);
        wait_for_copies<0>();
        landed();
        __syncthreads();
        for (int line = 0; line < BAND; line++)
            for (int from = 0; from < WIDE; from += 16 * TOGETHER)
                gather_pixels(sum, own + (line * WIDE + from) * PITCH, band + line * STRIDE1 * LINE + from * 8);
    }
    const int lane = threadIdx.x % 32;
    parts += blockIdx.x * (Index)PARTS;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const int channel = threadIdx.x / 32 * 16 + lane / 4 + 8 * half;
        if (channel >= OUT) continue;
        #pragma unroll
        for (int tap = 0; tap < WINDOW1; tap++)
            #pragma unroll
            for (int n = 0; n < DEPTH / 8; n++)
                *(float2*)(parts + channel * (WINDOW1 * DEPTH) + tap * DEPTH + 8 * n + lane % 4 * 2)
                    = float2 { sum[tap][n][2 * half], sum[tap][n][2 * half + 1] };
    }
}
