// The gradient of the weight of a convolution that filters each channel by itself. A block has some neighbouring channels and a chunk of the pixels:
// each of its lanes adds every LANES-th pixel for `PIECE` taps of the window, and then the lanes are added.

struct alignas(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Channels { T at[VECTOR]; };

inline void run(const T* __restrict__ image, const T* __restrict__ gradient, O* __restrict__ result, R* __restrict__ parts)
{
    Lane own = lane_of(blockIdx.x);
    int start = own.chunk * SHARE, end = start + SHARE < PIXELS ? start + SHARE : PIXELS;
    int apart[PIECE][3];
    #pragma unroll
    for (int t = 0; t < PIECE; t++) {
        int tap = own.piece * PIECE + t;
        apart[t][2] = tap % WINDOW2 * DILATION2 - LOW2;
        apart[t][1] = tap / WINDOW2 % WINDOW1 * DILATION1 - LOW1;
        apart[t][0] = tap < TAPS ? tap / (WINDOW2 * WINDOW1) * DILATION0 - LOW0 : -(1 << 29);
    }
    R sum[PIECE][VECTOR] = {};
    for (int number = start + own.lane; own.is_mine && number < end; number += LANES) {
        unsigned rest = number;
        int o2 = (int)(rest % PIXELS2);
        rest /= PIXELS2;
        int o1 = (int)(rest % PIXELS1);
        rest /= PIXELS1;
        int o0 = (int)(rest % PIXELS0), n = (int)(rest / PIXELS0);
        Channels dy = *(const Channels*)(gradient + n * G_IMAGE + o0 * G0 + o1 * G1 + o2 * G2 + own.channel * G_CHANNEL);
        const T* x = image + n * X_IMAGE + own.channel * X_CHANNEL;
        #pragma unroll
        for (int t = 0; t < PIECE; t++) {
            int p0 = o0 * STRIDE0 + apart[t][0], p1 = o1 * STRIDE1 + apart[t][1], p2 = o2 * STRIDE2 + apart[t][2];
            if ((unsigned)p0 >= IMAGE0 || (unsigned)p1 >= IMAGE1 || (unsigned)p2 >= IMAGE2) continue;
            Channels pixel = *(const Channels*)(x + p0 * X0 + p1 * X1 + p2 * X2);
            #pragma unroll
            for (int j = 0; j < VECTOR; j++) sum[t][j] += widen(pixel.at[j]) * widen(dy.at[j]);
        }
    }
    add_lanes(own, sum, result, parts);
}
