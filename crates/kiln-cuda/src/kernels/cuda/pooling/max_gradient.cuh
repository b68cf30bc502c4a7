// The gradient of a pool of largest elements whose windows are known. A thread has a block of neighbouring places and looks at all windows that contain
// one of them, in order: the gradient of a window goes to the place whose index it has, and is read once for the block.

struct alignas(sizeof(I) * VECTOR < 16 ? sizeof(I) * VECTOR : 16) Indices { I at[VECTOR]; };

constexpr int BLOCK = BLOCK0 * BLOCK1 * BLOCK2;

inline void run(const T* __restrict__ gradient, const I* __restrict__ indices, T* __restrict__ result)
{
    Index number = ((Index)blockIdx.x * THREADS + threadIdx.x) * VECTOR;
    if (number >= NUMBERS) return;
    Place x = place_among(number, BLOCKS0, BLOCKS1, BLOCKS2);
    x.at[0] *= BLOCK0;
    x.at[1] *= BLOCK1;
    x.at[2] *= BLOCK2;
    Windows w0 = windows_of(x.at[0], BLOCK0, WINDOW0, STRIDE0, LOW0, DILATION0, IMAGE0);
    Windows w1 = windows_of(x.at[1], BLOCK1, WINDOW1, STRIDE1, LOW1, DILATION1, IMAGE1);
    Windows w2 = windows_of(x.at[2], BLOCK2, WINDOW2, STRIDE2, LOW2, DILATION2, IMAGE2);
    const T* dy = gradient + x.image * X_IMAGE + x.channel * X_CHANNEL;
    const I* places = indices + x.image * I_IMAGE + x.channel * I_CHANNEL;
    R sum[BLOCK][VECTOR] = {};
    for (int o0 = w0.first; o0 <= w0.last; o0++)
        for (int o1 = w1.first; o1 <= w1.last; o1++)
            for (int o2 = w2.first; o2 <= w2.last; o2++) {
                Indices at = *(const Indices*)(places + o0 * I0 + o1 * I1 + o2 * I2);
                Channels from = *(const Channels*)(dy + o0 * X0 + o1 * X1 + o2 * X2);
                #pragma unroll
                for (int b = 0; b < BLOCK; b++) {
                    int b0 = b / (BLOCK1 * BLOCK2), b1 = b / BLOCK2 % BLOCK1, b2 = b % BLOCK2;
                    I here = (I)(((Count)(x.at[0] + b0) * RESULT1 + x.at[1] + b1) * RESULT2 + x.at[2] + b2);
                    #pragma unroll
                    for (int j = 0; j < VECTOR; j++)
                        if (at.at[j] == here) sum[b][j] += widen(from.at[j]);
                }
            }
    #pragma unroll
    for (int b = 0; b < BLOCK; b++) {
        Place to = x;
        to.at[0] += b / (BLOCK1 * BLOCK2);
        to.at[1] += b / BLOCK2 % BLOCK1;
        to.at[2] += b % BLOCK2;
        // Blocks at the end of an extent may go beyond it.
        if (to.at[0] >= RESULT0 || to.at[1] >= RESULT1 || to.at[2] >= RESULT2) continue;
        Channels all;
        #pragma unroll
        for (int j = 0; j < VECTOR; j++) all.at[j] = narrow(sum[b][j]);
        *(Channels*)(result + result_at(to)) = all;
    }
}
