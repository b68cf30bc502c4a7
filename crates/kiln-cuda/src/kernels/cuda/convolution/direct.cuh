// A convolution or the gradient of its input, one result a thread: for any type, and where tiles would be mostly empty.

inline void run(const T* __restrict__ image, const T* __restrict__ weight, O* __restrict__ result)
{
    Index number = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (number >= RESULTS) return;
    Place y = place_of(number);
    int group = y.channel / OUT;
    const T* x = image + y.image * X_IMAGE + group * DEPTH * X_CHANNEL;
    const T* w = weight + group * W_GROUP + (y.channel - group * OUT) * W_RESULT;
    R sum = 0;
    for (int k0 = 0; k0 < WINDOW0; k0++) {
        int p0 = source(y.at[0], k0, STRIDE0, LOW0, DILATION0, IMAGE0);
        if (p0 < 0) continue;
        for (int k1 = 0; k1 < WINDOW1; k1++) {
            int p1 = source(y.at[1], k1, STRIDE1, LOW1, DILATION1, IMAGE1);
            if (p1 < 0) continue;
            for (int k2 = 0; k2 < WINDOW2; k2++) {
                int p2 = source(y.at[2], k2, STRIDE2, LOW2, DILATION2, IMAGE2);
                if (p2 < 0) continue;
                const T* pixel = x + p0 * X0 + p1 * X1 + p2 * X2;
                const T* tap = w + k0 * W0 + k1 * W1 + k2 * W2;
                for (int c = 0; c < DEPTH; c++) sum += widen(pixel[c * X_CHANNEL]) * widen(tap[c * W_DEPTH]);
            }
        }
    }
    result[result_at(y)] = narrow(sum);
}
