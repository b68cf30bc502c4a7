// The gradient of the weight of a convolution that filters each channel by itself, by strips of the gradient. A block has some neighbouring channels
// and a chunk of the strips: each of its lanes adds every LANES-th strip for `LINES` lines of the window, and then the lanes are added.

inline void run(const T* __restrict__ image, const T* __restrict__ gradient, O* __restrict__ result, R* __restrict__ parts)
{
    Lane own = lane_of(blockIdx.x);
    int first_line = own.piece * LINES;
    int start = own.chunk * SHARE, end = start + SHARE < STRIPS ? start + SHARE : STRIPS;
    R sum[LINES * WINDOW2][VECTOR] = {};
    for (int number = start + own.lane; own.is_mine && number < end; number += LANES) {
        unsigned rest = number;
        int strip = (int)(rest % COUNT), o2 = strip * STRIP, begin = strip * HOP + FIRST;
        rest /= COUNT;
        int o1 = (int)(rest % PIXELS1);
        rest /= PIXELS1;
        int o0 = (int)(rest % PIXELS0), n = (int)(rest / PIXELS0);
        const T* dy = gradient + n * G_IMAGE + o0 * G0 + o1 * G1 + o2 * G2 + own.channel * G_CHANNEL;
        const T* x = image + n * X_IMAGE + own.channel * X_CHANNEL + begin * X2;
        R g[STRIP][VECTOR];
        #pragma unroll
        for (int j = 0; j < STRIP; j++) {
            Channels from = {};
            if (PIXELS2 % STRIP == 0 || o2 + j < PIXELS2) from = *(const Channels*)(dy + j * G2);
            #pragma unroll
            for (int c = 0; c < VECTOR; c++) g[j][c] = widen(from.at[c]);
        }
        #pragma unroll
        for (int l = 0; l < LINES; l++) {
            int k0 = (first_line + l) / WINDOW1, k1 = (first_line + l) % WINDOW1;
            int p0 = o0 * STRIDE0 - LOW0 + k0 * DILATION0, p1 = o1 * STRIDE1 - LOW1 + k1 * DILATION1;
            R pixel[SPAN][VECTOR];
            read_line(pixel, x + p0 * X0 + p1 * X1, begin, k0 < WINDOW0 && (unsigned)p0 < IMAGE0 && (unsigned)p1 < IMAGE1);
            #pragma unroll
            for (int k2 = 0; k2 < WINDOW2; k2++) {
                #pragma unroll
                for (int j = 0; j < STRIP; j++) {
                    #pragma unroll
                    for (int c = 0; c < VECTOR; c++)
                        sum[l * WINDOW2 + k2][c] += pixel[j * STRIDE2 + k2 * DILATION2][c] * g[j][c];
                }
            }
        }
    }
    add_lanes(own, sum, result, parts);
}
