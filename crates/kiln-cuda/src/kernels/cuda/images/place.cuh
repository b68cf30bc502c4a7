// Results one after the other, in the order in which they lie in memory.

// An element of the result: its image, channel and place.
struct Place { int image, channel, at[3]; };

// Element `number` of the result, counted in the order of memory.
inline Place place_of(Index element)
{
    Place place;
    Count number = (Count)element;
    if (CHANNELS_LAST) {
        place.channel = (int)(number % CHANNELS);
        number /= CHANNELS;
    }
    place.at[2] = (int)(number % RESULT2);
    number /= RESULT2;
    place.at[1] = (int)(number % RESULT1);
    number /= RESULT1;
    place.at[0] = (int)(number % RESULT0);
    number /= RESULT0;
    if (!CHANNELS_LAST) {
        place.channel = (int)(number % CHANNELS);
        number /= CHANNELS;
    }
    place.image = (int)number;
    return place;
}

inline Index result_at(const Place& place)
{
    return place.image * Y_IMAGE + place.at[0] * Y0 + place.at[1] * Y1 + place.at[2] * Y2 + place.channel * Y_CHANNEL;
}
