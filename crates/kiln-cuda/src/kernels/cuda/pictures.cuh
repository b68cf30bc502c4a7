// A batch of decoded pictures, cropped, scaled and normalised.
//
// Scaling is bilinear, and averages over all pixels of the source where it shrinks (a triangle as wide as two
// pixels of the result). Rows are scaled before columns, with a rounding to 8 bits after each, as Pillow
// does.

// What all pictures of a batch have in common. The views follow it in memory.
struct kiln_frame {
    kiln_u32 width, height;
    // A byte becomes byte * scale + shift, by channel.
    float scale[3], shift[3];
};

// What becomes of one picture. Behind the first two all numbers have 32 bits.
struct kiln_view {
    // Where the rectangle to be scaled begins among the decoded pixels, and where its narrowed rows go.
    kiln_u64 pixels, narrowed;
    // Bytes from row to row of the decoded picture.
    kiln_u32 pitch;
    // The rectangle's size, before and after.
    kiln_u32 from_width, from_height, scaled_width, scaled_height;
    // Where the result begins in the scaled rectangle; what lies outside is black.
    int x, y;
    kiln_u32 mirrored;
    // The rows of the rectangle that the result needs.
    kiln_u32 first_row, rows;
};

// The pixels of a line of `from` that one of the `scaled` pixels takes, and with which weights.
struct kiln_taps {
    int first, last;
    float center, reach;

    kiln_taps(int at, kiln_u32 from, kiln_u32 scaled)
    {
        const double step = (double)from / scaled, wide = step > 1 ? step : 1, middle = (at + 0.5) * step;
        first = (int)(middle - wide + 0.5);
        last = (int)(middle + wide + 0.5);
        if (first < 0) first = 0;
        if (last > (int)from) last = from;
        // Near the first pixel, where 32 bits are exact enough.
        center = (float)(middle - first - 0.5);
        reach = (float)(1 / wide);
    }

    float weight(int at) const
    {
        const float away = (at - first) - center;
        const float weight = 1 - (away < 0 ? -away : away) * reach;
        return weight > 0 ? weight : 0;
    }
};

inline unsigned char kiln_level(float value)
{
    const int level = (int)(value + 0.5f);
    return level < 0 ? 0 : level > 255 ? 255 : level;
}

// One picture a block of the first dimension; the blocks of the second share its rows.
inline void kiln_picture_rows(const kiln_frame* frame, const unsigned char* pixels, unsigned char* narrowed)
{
    const kiln_view view = ((const kiln_view*)(frame + 1))[blockIdx.x];
    const kiln_u32 width = frame->width, items = view.rows * width;
    for (kiln_u32 item = blockIdx.y * blockDim.x + threadIdx.x; item < items; item += gridDim.y * blockDim.x) {
        const kiln_u32 row = item / width;
        const int at = view.x + (int)(item % width);
        if (at < 0 || at >= (int)view.scaled_width) continue;
        const kiln_taps taps(at, view.from_width, view.scaled_width);
        const unsigned char* line = pixels + view.pixels + (kiln_u64)(view.first_row + row) * view.pitch;
        float sums[3] = { 0, 0, 0 }, total = 0;
        for (int x = taps.first; x < taps.last; x++) {
            const float weight = taps.weight(x);
            total += weight;
            for (int c = 0; c < 3; c++) sums[c] += weight * line[3 * x + c];
        }
        unsigned char* to = narrowed + view.narrowed + 3ull * item;
        for (int c = 0; c < 3; c++) to[c] = kiln_level(sums[c] / total);
    }
}

inline void kiln_picture_columns(const kiln_frame* frame, const unsigned char* narrowed, float* result)
{
    const kiln_view view = ((const kiln_view*)(frame + 1))[blockIdx.x];
    const kiln_u32 width = frame->width, items = frame->height * width;
    for (kiln_u32 item = blockIdx.y * blockDim.x + threadIdx.x; item < items; item += gridDim.y * blockDim.x) {
        const int row = item / width, column = item % width;
        const int across = view.x + column, at = view.y + row;
        unsigned char levels[3] = { 0, 0, 0 };
        if (across >= 0 && across < (int)view.scaled_width && at >= 0 && at < (int)view.scaled_height) {
            const kiln_taps taps(at, view.from_height, view.scaled_height);
            float sums[3] = { 0, 0, 0 }, total = 0;
            for (int y = taps.first; y < taps.last; y++) {
                const float weight = taps.weight(y);
                const unsigned char* from =
                    narrowed + view.narrowed + 3ull * ((kiln_u64)(y - (int)view.first_row) * width + column);
                total += weight;
                for (int c = 0; c < 3; c++) sums[c] += weight * from[c];
            }
            for (int c = 0; c < 3; c++) levels[c] = kiln_level(sums[c] / total);
        }
        const kiln_u32 to = view.mirrored ? width - 1 - column : column;
        for (int c = 0; c < 3; c++)
            result[((3ull * blockIdx.x + c) * frame->height + row) * width + to] =
                (float)levels[c] * frame->scale[c] + frame->shift[c];
    }
}
