// A convolution's weight as tensor cores read it: [group, channel of the result, tap, depth], rounded if it is of f32. A thread packs all taps of one channel and depth.

template <class V> inline V packed_element(V x) { return x; }
template <> inline float packed_element<float>(float x) { return rounded(x); }

inline void run(const T* __restrict__ weight, T* __restrict__ packed)
{
    Index number = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (number >= (Index)GROUPS * OUT * DEPTH) return;
    int depth = (int)(number % DEPTH);
    Index row = number / DEPTH;
    int channel = (int)(row % OUT), group = (int)(row / OUT);
    const T* from = weight + group * W_GROUP + channel * W_RESULT + depth * W_DEPTH;
    T* to = packed + row * TAPS * DEPTH + depth;
    for (int k0 = 0; k0 < WINDOW0; k0++)
        for (int k1 = 0; k1 < WINDOW1; k1++)
            for (int k2 = 0; k2 < WINDOW2; k2++)
                to[((k0 * WINDOW1 + k1) * WINDOW2 + k2) * DEPTH] = packed_element(from[k0 * W0 + k1 * W1 + k2 * W2]);
}
