// A convolution that filters each channel by itself, or the gradient of its input, by strips of the result: each element that a strip reads of a line
// is read once, for all taps. Strips of gradients begin at multiples of the stride.

struct alignas(sizeof(O) * VECTOR < 16 ? sizeof(O) * VECTOR : 16) Results { O at[VECTOR]; };

// Whether tap `k` of a line joins result `j` of a strip with an element, and which of those read that is.
inline bool is_joined(int j, int k) { return !GRADIENT || (j + LOW2 - k * DILATION2) % STRIDE2 == 0; }
inline int joined(int j, int k)
{
    return (GRADIENT ? (j + LOW2 - k * DILATION2) / STRIDE2 : j * STRIDE2 - LOW2 + k * DILATION2) - FIRST;
}

inline void run(const T* __restrict__ image, const T* __restrict__ packed, O* __restrict__ result)
{
    Index number = ((Index)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (number >= RESULTS) return;
    // The place of a strip among strips.
    Place y = place_of(number);
    int begin = y.at[2] * HOP + FIRST;
    const T* x = image + y.image * X_IMAGE + y.channel * X_CHANNEL + begin * X2;
    const T* w = packed + y.channel;
    R sum[STRIP][VECTOR] = {};
    for (int k0 = 0; k0 < WINDOW0; k0++) {
        int p0 = source(y.at[0], k0, STRIDE0, LOW0, DILATION0, IMAGE0);
        #pragma unroll LINES
        for (int k1 = 0; k1 < WINDOW1; k1++) {
            int p1 = source(y.at[1], k1, STRIDE1, LOW1, DILATION1, IMAGE1);
            R pixel[SPAN][VECTOR];
            read_line(pixel, x + p0 * X0 + p1 * X1, begin, p0 >= 0 && p1 >= 0);
            #pragma unroll
            for (int k2 = 0; k2 < WINDOW2; k2++) {
                Channels tap = *(const Channels*)(w + (Index)((k0 * WINDOW1 + k1) * WINDOW2 + k2) * OUT_PADDED);
                #pragma unroll
                for (int j = 0; j < STRIP; j++) {
                    if (!is_joined(j, k2)) continue;
                    #pragma unroll
                    for (int c = 0; c < VECTOR; c++) sum[j][c] += pixel[joined(j, k2)][c] * widen(tap.at[c]);
                }
            }
        }
    }
    O* to = result + result_at(y);
    #pragma unroll
    for (int j = 0; j < STRIP; j++) {
        if (WIDTH % STRIP != 0 && y.at[2] * STRIP + j >= WIDTH) continue;
        Results row;
        #pragma unroll
        for (int c = 0; c < VECTOR; c++) row.at[c] = narrow(sum[j][c]);
        *(Results*)(to + j * STEP) = row;
    }
}
