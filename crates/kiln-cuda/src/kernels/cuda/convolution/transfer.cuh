// Copies a tensor into one of other strides. Channels behind the last of the source become zeros.
// A thread takes all channels of a place in vectors of four, all places of a channel, or one element.

// Where element `channel` of place `place` of image `image` is.
inline Index source_at(Count image, Count place, Count channel)
{
    const Count i2 = place % EXTENT2, i1 = place / EXTENT2 % EXTENT1, i0 = place / EXTENT2 / EXTENT1;
    return image * F_IMAGE + i0 * F0 + i1 * F1 + i2 * F2 + channel * F_CHANNEL;
}

inline Index target_at(Count image, Count place, Count channel)
{
    const Count i2 = place % EXTENT2, i1 = place / EXTENT2 % EXTENT1, i0 = place / EXTENT2 / EXTENT1;
    return image * T_IMAGE + i0 * T0 + i1 * T1 + i2 * T2 + channel * T_CHANNEL;
}

inline T element(const T* __restrict__ from, Count image, Count place, Count channel)
{
    return channel < (Count)CHANNELS ? from[source_at(image, place, channel)] : T{};
}

inline void run(const T* __restrict__ from, T* __restrict__ to)
{
    const Count number = (Count)blockIdx.x * THREADS + threadIdx.x;
    if (number >= (Count)UNITS) return;
    if (EACH == EACH_PLACE) {
        const Count image = number / PLANE, place = number % PLANE;
        for (Count first = 0; first < (Count)TO_CHANNELS; first += 4) {
            Four four;
            for (Count lane = 0; lane < 4; lane++) four.at[lane] = element(from, image, place, first + lane);
            *(Four*)(to + target_at(image, place, first)) = four;
        }
    } else if (EACH == EACH_CHANNEL) {
        const Count image = number / TO_CHANNELS, channel = number % TO_CHANNELS;
        for (Count place = 0; place < (Count)PLANE; place++)
            to[target_at(image, place, channel)] = element(from, image, place, channel);
    } else {
        const Count pixel = number / TO_CHANNELS, channel = number % TO_CHANNELS;
        const Count image = pixel / PLANE, place = pixel % PLANE;
        to[target_at(image, place, channel)] = element(from, image, place, channel);
    }
}
