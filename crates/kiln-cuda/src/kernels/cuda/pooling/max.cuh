// The largest element of each window, and where it is: the first on ties, the first NaN if there is one.

struct alignas(sizeof(I) * VECTOR < 16 ? sizeof(I) * VECTOR : 16) Indices { I at[VECTOR]; };

inline void run(const T* __restrict__ image, T* __restrict__ result, I* __restrict__ indices)
{
    Index number = ((Index)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (number >= RESULTS) return;
    Place y = place_of(number);
    const T* x = image + y.image * X_IMAGE + y.channel * X_CHANNEL;
    R best[VECTOR];
    Index where[VECTOR];
    #pragma unroll
    for (int j = 0; j < VECTOR; j++) {
        best[j] = lowest();
        where[j] = -1;
    }
    for (int k0 = 0; k0 < WINDOW0; k0++) {
        int p0 = place_in(y.at[0], k0, STRIDE0, LOW0, DILATION0);
        if ((unsigned)p0 >= IMAGE0) continue;
        for (int k1 = 0; k1 < WINDOW1; k1++) {
            int p1 = place_in(y.at[1], k1, STRIDE1, LOW1, DILATION1);
            if ((unsigned)p1 >= IMAGE1) continue;
            #pragma unroll UNROLLED
            for (int k2 = 0; k2 < WINDOW2; k2++) {
                int p2 = place_in(y.at[2], k2, STRIDE2, LOW2, DILATION2);
                if ((unsigned)p2 >= IMAGE2) continue;
                Channels pixel = *(const Channels*)(x + p0 * X0 + p1 * X1 + p2 * X2);
                Index here = ((Index)p0 * IMAGE1 + p1) * IMAGE2 + p2;
                #pragma unroll
                for (int j = 0; j < VECTOR; j++) {
                    R value = widen(pixel.at[j]);
                    if (where[j] >= 0 && (best[j] != best[j] || !(value > best[j] || value != value))) continue;
                    best[j] = value;
                    where[j] = here;
                }
            }
        }
    }
    Channels to;
    #pragma unroll
    for (int j = 0; j < VECTOR; j++) to.at[j] = narrow(best[j]);
    *(Channels*)(result + result_at(y)) = to;
    if (!WITH_INDICES) return;
    Indices at;
    #pragma unroll
    for (int j = 0; j < VECTOR; j++) at.at[j] = (I)(where[j] < 0 ? 0 : where[j]);
    *(Indices*)(indices + y.image * I_IMAGE + y.at[0] * I0 + y.at[1] * I1 + y.at[2] * I2 + y.channel * I_CHANNEL) = at;
}
