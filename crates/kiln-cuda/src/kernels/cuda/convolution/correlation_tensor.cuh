// A correlation whose products are of tensor cores. Both operands lie in shared memory with the depth in rows: pixels with their channels at a tap,
// and channels of the result with their packed weight.

// Eight rows of 16 bytes begin in different banks.
constexpr int PITCH = BK + 4;
static_assert(STAGE == (BM + BN) * PITCH, "a stage is of another size");

// Rows that a thread copies a vector of: every RAISE-th from its own.
constexpr int FOURS = BK / 4, RAISE = THREADS / FOURS;
static_assert(BM % RAISE == 0 && BN % RAISE == 0, "threads have different numbers of rows");

// Whether the first dimension has a single place and a single tap, which is always inside.
constexpr bool FLAT = IMAGE0 == 1 && RESULT0 == 1 && WINDOW0 == 1 && LOW0 == 0 && STEP0 == 1 && SLIDE0 == 1;

// Where a row of the image is read: its place at tap 0 from the image's start, and its coordinates.
struct Row { Index base; int at[3]; };

inline Row row_of_image(int number, const Phase& phase)
{
    Pixel pixel = pixel_of(number, phase);
    Row row;
    #pragma unroll
    for (int axis = 0; axis < 3; axis++) row.at[axis] = pixel.at[axis];
    row.base = 0;
    if (number < PIXELS) row.base = pixel.base + pixel.at[0] * X0 + pixel.at[1] * X1 + pixel.at[2] * X2;
    return row;
}

inline void multiply(float (&sum)[MT][NT][4], const float* stage)
{
    int lane = threadIdx.x % 32;
    const float* a = stage + (warp_row() + lane % 16) * PITCH + lane / 16 * 4;
    const float* b = stage + (BM + warp_column() + lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 4;
    #pragma unroll
    for (int k = 0; k < BK; k += 8) {
        float left[MT][4], right[NT / 2][4];
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            load_fragment(left[m], a + 16 * m * PITCH + k);
            #pragma unroll
            for (int i = 0; i < 4; i++) left[m][i] = rounded(left[m][i]);
        }
        // The weight was rounded when it was packed.
        #pragma unroll
        for (int n = 0; n < NT / 2; n++) load_fragment(right[n], b + 16 * n * PITCH + k);
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int n = 0; n < NT / 2; n++) {
                multiply_fragments(sum[m][2 * n], left[m], right[n][0], right[n][1]);
                multiply_fragments(sum[m][2 * n + 1], left[m], right[n][2], right[n][3]);
            }
    }
}

inline void store(const float (&sum)[MT][NT][4], O* result, float* parts, int first_pixel, int group, int column, const Phase& phase)
{
    #pragma unroll
    for (int row = 0; row < 2 * MT; row++) {
        int m = row / 2, half = row % 2;
        unsigned number = first_pixel + row_of(m, half);
        if (number >= PIXELS) continue;
        int o2 = (int)(number % TILED2) * STEP2 + phase.begin[2];
        number /= TILED2;
        int o1 = (int)(number % TILED1) * STEP1 + phase.begin[1];
        number /= TILED1;
        int o0 = (int)(number % TILED0) * STEP0 + phase.begin[0], n = (int)(number / TILED0);
        if (PHASES > 1 && (o0 >= RESULT0 || o1 >= RESULT1 || o2 >= RESULT2)) continue;
        O* to = result + n * Y_IMAGE + o0 * Y0 + o1 * Y1 + o2 * Y2 + group * OUT * Y_CHANNEL;
        float* part = parts + ((((Index)n * RESULT0 + o0) * RESULT1 + o1) * RESULT2 + o2) * CHANNELS + group * OUT;
        #pragma unroll
        for (int i = 0; i < NT; i++) {
            int c = column + column_of(i);
            if (c >= OUT) continue;
            Pair pair = { { sum[m][i][2 * half], sum[m][i][2 * half + 1] } };
            if (CHUNKS > 1) {
                *(Pair*)(part + c) = pair;
            } else if (STORE_PAIRS) {
                PairOfResults results = { { narrow(pair.at[0]), narrow(pair.at[1]) } };
                *(PairOfResults*)(to + c) = results;
            } else {
                to[c * Y_CHANNEL] = narrow(pair.at[0]);
                to[(c + 1) * Y_CHANNEL] = narrow(pair.at[1]);
            }
        }
    }
}

inline void run(const T* __restrict__ image, const T* __restrict__ packed, O* __restrict__ result, float* __restrict__ parts)
{
    unsigned block = blockIdx.x;
    // Neighbouring blocks read the same pixels: the channels of narrow groups share what memory is read in.
    int column = block % COLUMN_TILES * BN;
    block /= COLUMN_TILES;
    int group = block % GROUPS;
    block /= GROUPS;
    int first_pixel = block % PIXEL_TILES * BM;
    block /= PIXEL_TILES;
    Phase phase = phase_of(block % PHASES);
    int chunk = block / PHASES;

    int depth = phase.count[0] * phase.count[1] * phase.count[2] * DEPTH;
    int steps = (depth + BK * PER_WORD - 1) / (BK * PER_WORD), share = (steps + CHUNKS - 1) / CHUNKS;
    int step = chunk * share, end = step + share < steps ? step + share : steps;

    image += group * DEPTH * X_CHANNEL;
    packed += (Index)group * OUT * TAPS * DEPTH;
    int own = threadIdx.x / FOURS, place = threadIdx.x % FOURS * 4;
    Row rows[BM / RAISE];
    #pragma unroll
    for (int i = 0; i < BM / RAISE; i++) rows[i] = row_of_image(first_pixel + own + i * RAISE, phase);

    auto fetch = [&](float* stage, int step) {
        int d = (step * BK + place) * PER_WORD;
        bool deep = d < depth;
        Tap tap = tap_of(deep ? d : 0, phase);
        Index apart = tap.apart[0] * X0 + tap.apart[1] * X1 + tap.apart[2] * X2 + tap.channel;
        float* to = stage + own * PITCH + place;
        #pragma unroll
        for (int i = 0; i < BM / RAISE; i++) {
            bool inside = deep && (unsigned)(rows[i].at[1] + tap.apart[1]) < IMAGE1 && (unsigned)(rows[i].at[2] + tap.apart[2]) < IMAGE2
                && (FLAT || (unsigned)(rows[i].at[0] + tap.apart[0]) < IMAGE0);
            copy_vector(to + i * RAISE * PITCH, image + (inside ? rows[i].base + apart : 0), inside);
        }
        #pragma unroll
        for (int i = 0; i < BN / RAISE; i++) {
            int n = column + own + i * RAISE;
            bool inside = deep && n < OUT;
            copy_vector(to + (BM + i * RAISE) * PITCH, packed + (inside ? (Index)n * (TAPS * DEPTH) + tap.row : 0), inside);
        }
    };
    float sum[MT][NT][4] = {};
    pipeline(step, end, fetch, [&](const float* stage) { multiply(sum, stage); });
    store(sum, result, parts + (Index)chunk * PARTS, first_pixel, group, column, phase);
}
