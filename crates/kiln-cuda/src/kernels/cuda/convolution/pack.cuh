// A convolution's weight as tiles read it: [group, tap, depth, channel of the result], the last padded with zeros to fours. A thread packs all
// taps of one channel and depth: in memory they are neighbours, and neighbouring threads write neighbours.

inline void run(const T* __restrict__ weight, T* __restrict__ packed)
{
    Index number = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (number >= (Index)GROUPS * DEPTH * OUT_PADDED) return;
    int channel = (int)(number % OUT_PADDED);
    Index rest = number / OUT_PADDED;
    int depth = (int)(rest % DEPTH), group = (int)(rest / DEPTH);
    const T* from = weight + group * W_GROUP + channel * W_RESULT + depth * W_DEPTH;
    T* to = packed + ((Index)group * TAPS * DEPTH + depth) * OUT_PADDED + channel;
    for (int k0 = 0; k0 < WINDOW0; k0++)
        for (int k1 = 0; k1 < WINDOW1; k1++)
            for (int k2 = 0; k2 < WINDOW2; k2++) {
                Index tap = (k0 * WINDOW1 + k1) * WINDOW2 + k2;
                to[tap * DEPTH * OUT_PADDED] = channel < OUT ? from[k0 * W0 + k1 * W1 + k2 * W2] : T{};
            }
}
