// The gradient of a pool of largest elements from any indices. A thread has a slice of the places of one channel of an image: it reads all indices of
// that channel in order, and adds the gradients of those in its slice. Sums are in the memory of the results, or in working memory of their type.

inline void run(const T* __restrict__ gradient, const I* __restrict__ indices, S* __restrict__ sums)
{
    Index number = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (number >= (Index)IMAGES * CHANNELS * SLICES) return;
    int channel = (int)(number % CHANNELS);
    Index rest = number / CHANNELS;
    int slice = (int)(rest % SLICES), image = (int)(rest / SLICES);
    long long begin = (long long)slice * SLICE, end = begin + SLICE < PLACES ? begin + SLICE : PLACES;
    const T* dy = gradient + image * X_IMAGE + channel * X_CHANNEL;
    const I* places = indices + image * I_IMAGE + channel * I_CHANNEL;
    S* to = sums + image * S_IMAGE + channel * S_CHANNEL;
    for (Index p = (Index)begin; p < (Index)end; p++) to[slot_at(p)] = (S)0;
    for (int o0 = 0; o0 < IMAGE0; o0++)
        for (int o1 = 0; o1 < IMAGE1; o1++)
            #pragma unroll 4
            for (int o2 = 0; o2 < IMAGE2; o2++) {
                long long at = (long long)places[o0 * I0 + o1 * I1 + o2 * I2];
                if (at < begin || at >= end) continue;
                Index slot = slot_at((Index)at);
                to[slot] = (S)(to[slot] + (S)widen(dy[o0 * X0 + o1 * X1 + o2 * X2]));
            }
}
