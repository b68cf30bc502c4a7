// A convolution that filters each channel by itself, or the gradient of its input: a thread has `VECTOR` neighbouring channels of one place.

struct alignas(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Channels { T at[VECTOR]; };
struct alignas(sizeof(O) * VECTOR < 16 ? sizeof(O) * VECTOR : 16) Results { O at[VECTOR]; };

inline void run(const T* __restrict__ image, const T* __restrict__ packed, O* __restrict__ result)
{
    Index number = ((Index)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (number >= RESULTS) return;
    Place y = place_of(number);
    const T* x = image + y.image * X_IMAGE + y.channel * X_CHANNEL;
    const T* w = packed + y.channel;
    R sum[VECTOR] = {};
    for (int k0 = 0; k0 < WINDOW0; k0++) {
        int p0 = source(y.at[0], k0, STRIDE0, LOW0, DILATION0, IMAGE0);
        for (int k1 = 0; k1 < WINDOW1; k1++) {
            int p1 = source(y.at[1], k1, STRIDE1, LOW1, DILATION1, IMAGE1);
            #pragma unroll UNROLLED
            for (int k2 = 0; k2 < WINDOW2; k2++) {
                int p2 = source(y.at[2], k2, STRIDE2, LOW2, DILATION2, IMAGE2);
                if (p0 < 0 || p1 < 0 || p2 < 0) continue;
                Channels pixel = *(const Channels*)(x + p0 * X0 + p1 * X1 + p2 * X2);
                Channels tap = *(const Channels*)(w + (Index)((k0 * WINDOW1 + k1) * WINDOW2 + k2) * OUT_PADDED);
                #pragma unroll
                for (int j = 0; j < VECTOR; j++) sum[j] += widen(pixel.at[j]) * widen(tap.at[j]);
            }
        }
    }
    Results to;
    #pragma unroll
    for (int j = 0; j < VECTOR; j++) to.at[j] = narrow(sum[j]);
    *(Results*)(result + result_at(y)) = to;
}
