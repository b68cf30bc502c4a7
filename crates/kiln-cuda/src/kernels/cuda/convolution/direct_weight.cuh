// The gradient of a convolution's weight, one element a thread: for any type. The result is dense: [channel, depth, window..].

inline void run(const T* __restrict__ image, const T* __restrict__ gradient, O* __restrict__ result)
{
    Index number = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (number >= RESULTS) return;
    Index rest = number;
    int k2 = (int)(rest % WINDOW2);
    rest /= WINDOW2;
    int k1 = (int)(rest % WINDOW1);
    rest /= WINDOW1;
    int k0 = (int)(rest % WINDOW0);
    rest /= WINDOW0;
    int c = (int)(rest % DEPTH), o = (int)(rest / DEPTH);
    const T* x = image + (o / OUT * DEPTH + c) * X_CHANNEL;
    const T* dy = gradient + o * G_CHANNEL;
    R sum = 0;
    for (int n = 0; n < IMAGES; n++)
        for (int o0 = 0; o0 < PIXELS0; o0++) {
            int p0 = o0 * STRIDE0 - LOW0 + k0 * DILATION0;
            if ((unsigned)p0 >= IMAGE0) continue;
            for (int o1 = 0; o1 < PIXELS1; o1++) {
                int p1 = o1 * STRIDE1 - LOW1 + k1 * DILATION1;
                if ((unsigned)p1 >= IMAGE1) continue;
                for (int o2 = 0; o2 < PIXELS2; o2++) {
                    int p2 = o2 * STRIDE2 - LOW2 + k2 * DILATION2;
                    if ((unsigned)p2 >= IMAGE2) continue;
                    sum += widen(x[n * X_IMAGE + p0 * X0 + p1 * X1 + p2 * X2])
                        * widen(dy[n * G_IMAGE + o0 * G0 + o1 * G1 + o2 * G2]);
                }
            }
        }
    result[number] = narrow(sum);
}
