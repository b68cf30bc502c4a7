// The gradient of a pool of means: each place looks at the windows that it is in.

inline void run(const T* __restrict__ gradient, T* __restrict__ result)
{
    Index number = ((Index)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (number >= RESULTS) return;
    Place x = place_of(number);
    Windows w0 = windows_at(x.at[0], WINDOW0, STRIDE0, LOW0, DILATION0, IMAGE0);
    Windows w1 = windows_at(x.at[1], WINDOW1, STRIDE1, LOW1, DILATION1, IMAGE1);
    Windows w2 = windows_at(x.at[2], WINDOW2, STRIDE2, LOW2, DILATION2, IMAGE2);
    const T* dy = gradient + x.image * X_IMAGE + x.channel * X_CHANNEL;
    S sum[VECTOR] = {};
    for (int o0 = w0.first; o0 <= w0.last; o0++) {
        if (!is_element(x.at[0], o0, STRIDE0, LOW0, DILATION0)) continue;
        R count0 = (R)counted(o0, WINDOW0, STRIDE0, LOW0, HIGH0, DILATION0, RESULT0);
        for (int o1 = w1.first; o1 <= w1.last; o1++) {
            if (!is_element(x.at[1], o1, STRIDE1, LOW1, DILATION1)) continue;
            R count1 = count0 * (R)counted(o1, WINDOW1, STRIDE1, LOW1, HIGH1, DILATION1, RESULT1);
            for (int o2 = w2.first; o2 <= w2.last; o2++) {
                if (!is_element(x.at[2], o2, STRIDE2, LOW2, DILATION2)) continue;
                R count = count1 * (R)counted(o2, WINDOW2, STRIDE2, LOW2, HIGH2, DILATION2, RESULT2);
                Channels from = *(const Channels*)(dy + o0 * X0 + o1 * X1 + o2 * X2);
                #pragma unroll
                for (int j = 0; j < VECTOR; j++) sum[j] += (S)(count == 0 ? (R)0 : widen(from.at[j]) / count);
            }
        }
    }
    Channels to;
    #pragma unroll
    for (int j = 0; j < VECTOR; j++) to.at[j] = narrow((R)sum[j]);
    *(Channels*)(result + result_at(x)) = to;
}
