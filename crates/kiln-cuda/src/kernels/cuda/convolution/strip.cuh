// Strips are `STRIP` neighbouring places of a line, of which a thread has `VECTOR` neighbouring channels. A window joins strip `n` with `SPAN` elements
// of a line of the image, the first of which is element `n * HOP + FIRST`. A line has `COUNT` strips.

struct alignas(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Channels { T at[VECTOR]; };

// Whether element `s` of a strip's is in the image. That of most is known before anything runs.
inline bool is_inside(int begin, int s)
{
    bool is_always = FIRST + s >= 0 && (COUNT - 1) * HOP + FIRST + s < IMAGE2;
    return is_always || (unsigned)(begin + s) < IMAGE2;
}

// Reads the elements from `begin`, the first of which `from` points to; zeros outside of the image, of which the line is no part if `is_line` is not
// set.
inline void read_line(R (&pixel)[SPAN][VECTOR], const T* __restrict__ from, int begin, bool is_line)
{
    #pragma unroll
    for (int s = 0; s < SPAN; s++) {
        Channels channels = {};
        if (is_line && is_inside(begin, s)) channels = *(const Channels*)(from + s * X2);
        #pragma unroll
        for (int c = 0; c < VECTOR; c++) pixel[s][c] = widen(channels.at[c]);
    }
}
