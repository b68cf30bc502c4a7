// Copies a picture into rows of ROW places with four channels each, of which place LOW is the picture's first: zeros before it, behind its last
// place, and in channels that it has not. A weight is such a picture, too.

inline void run(const T* __restrict__ from, T* __restrict__ to)
{
    const Count number = (Count)blockIdx.x * THREADS + threadIdx.x;
    if (number >= (Count)PLACES) return;
    const Count place = number % ROW, i1 = number / ROW % EXTENT1, i0 = number / ROW / EXTENT1 % EXTENT0;
    const Count image = number / ROW / EXTENT1 / EXTENT0, i2 = place - LOW;
    Four four = {};
    if (i2 < (Count)EXTENT2) {
        const Index at = image * F_IMAGE + i0 * F0 + i1 * F1 + i2 * F2;
        #pragma unroll
        for (int channel = 0; channel < CHANNELS; channel++) four.at[channel] = from[at + channel * F_CHANNEL];
    }
    *(Four*)(to + (Index)number * 4) = four;
}
