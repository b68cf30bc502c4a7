// The mean of each window.

inline void run(const T* __restrict__ image, T* __restrict__ result)
{
    Index number = ((Index)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (number >= RESULTS) return;
    Place y = place_of(number);
    const T* x = image + y.image * X_IMAGE + y.channel * X_CHANNEL;
    S sum[VECTOR] = {};
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
                #pragma unroll
                for (int j = 0; j < VECTOR; j++) sum[j] += (S)widen(pixel.at[j]);
            }
        }
    }
    R count = (R)counted(y.at[0], WINDOW0, STRIDE0, LOW0, HIGH0, DILATION0, IMAGE0)
        * (R)counted(y.at[1], WINDOW1, STRIDE1, LOW1, HIGH1, DILATION1, IMAGE1)
        * (R)counted(y.at[2], WINDOW2, STRIDE2, LOW2, HIGH2, DILATION2, IMAGE2);
    Channels to;
    #pragma unroll
    for (int j = 0; j < VECTOR; j++) to.at[j] = narrow(count == 0 ? (R)0 : (R)sum[j] / count);
    *(Channels*)(result + result_at(y)) = to;
}
