// The gradient of a pool of largest elements whose windows are known: each place looks at the windows that it is in, and adds the gradients of those
// whose largest element it was.

struct alignas(sizeof(I) * VECTOR < 16 ? sizeof(I) * VECTOR : 16) Indices { I at[VECTOR]; };

inline void run(const T* __restrict__ gradient, const I* __restrict__ indices, T* __restrict__ result)
{
    Index number = ((Index)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (number >= RESULTS) return;
    Place x = place_of(number);
    I here = (I)(((Index)x.at[0] * RESULT1 + x.at[1]) * RESULT2 + x.at[2]);
    Windows w0 = windows_at(x.at[0], WINDOW0, STRIDE0, LOW0, DILATION0, IMAGE0);
    Windows w1 = windows_at(x.at[1], WINDOW1, STRIDE1, LOW1, DILATION1, IMAGE1);
    Windows w2 = windows_at(x.at[2], WINDOW2, STRIDE2, LOW2, DILATION2, IMAGE2);
    const T* dy = gradient + x.image * X_IMAGE + x.channel * X_CHANNEL;
    const I* places = indices + x.image * I_IMAGE + x.channel * I_CHANNEL;
    R sum[VECTOR] = {};
    for (int o0 = w0.first; o0 <= w0.last; o0++)
        for (int o1 = w1.first; o1 <= w1.last; o1++)
            for (int o2 = w2.first; o2 <= w2.last; o2++) {
                Indices at = *(const Indices*)(places + o0 * I0 + o1 * I1 + o2 * I2);
                Channels from = *(const Channels*)(dy + o0 * X0 + o1 * X1 + o2 * X2);
                #pragma unroll
                for (int j = 0; j < VECTOR; j++)
                    if (at.at[j] == here) sum[j] += widen(from.at[j]);
            }
    Channels to;
    #pragma unroll
    for (int j = 0; j < VECTOR; j++) to.at[j] = narrow(sum[j]);
    *(Channels*)(result + result_at(x)) = to;
}
