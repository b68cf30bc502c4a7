// Results one after the other, in the order in which they lie in memory.

// An element of the result: its image, channel and place.
struct Place { int image, channel, at[3]; };

// Element `number` of a result of these extents, counted in the order of memory. Extents keep their types: numbers of
// a template divide by a reciprocal.
template <class Extent0, class Extent1, class Extent2>
inline Place place_among(Index element, Extent0 extent0, Extent1 extent1, Extent2 extent2)
{
    Place place;
    Count number = (Count)element;
    if (CHANNELS_LAST) {
        place.channel = (int)(number % CHANNELS);
        number /= CHANNELS;
    }
    place.at[2] = (int)(number % extent2);
    number /= extent2;
    place.at[1] = (int)(number % extent1);
    number /= extent1;
    place.at[0] = (int)(number % extent0);
    number /= extent0;
    if (!CHANNELS_LAST) {
        place.channel = (int)(number % CHANNELS);
        number /= CHANNELS;
    }
    place.image = (int)number;
    return place;
}

inline Place place_of(Index element) { return place_among(element, RESULT0, RESULT1, RESULT2); }

inline Index result_at(const Place& place)
{
    return place.image * Y_IMAGE + place.at[0] * Y0 + place.at[1] * Y1 + place.at[2] * Y2 + place.channel * Y_CHANNEL;
}
