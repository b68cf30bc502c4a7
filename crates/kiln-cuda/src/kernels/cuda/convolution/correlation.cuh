// What a thread brings of a tile of the image: `VECTOR` neighbouring channels of some pixels.
constexpr int BROUGHT = BM * BK / VECTOR;
constexpr int BRINGS = (BROUGHT + THREADS - 1) / THREADS;
struct alignas(sizeof(T) * VECTOR < 16 ? sizeof(T) * VECTOR : 16) Channels { T at[VECTOR]; };

// Which pixel of the tile, and which channels, a thread brings as its number `i`.
inline int slot_pixel(int i)
{
    unsigned slot = threadIdx.x + i * THREADS;
    return (int)(PIXELS_FIRST ? slot % BM : slot / (BK / VECTOR));
}

inline int slot_depth(int i)
{
    unsigned slot = threadIdx.x + i * THREADS;
    return (int)(PIXELS_FIRST ? slot / BM : slot % (BK / VECTOR)) * VECTOR;
}

inline void read_image(Channels (&held)[BRINGS], const T* image, const Pixel (&pixels)[BRINGS], int start, int depth, const Phase& phase)
{
    #pragma unroll
    for (int i = 0; i < BRINGS; i++) {
        #pragma unroll
        for (int j = 0; j < VECTOR; j++) held[i].at[j] = T{};
        int d = start + slot_depth(i);
        if (d >= depth) continue;
        Tap tap = tap_of(d, phase);
        const Pixel& pixel = pixels[i];
        int p0 = pixel.at[0] + tap.apart[0], p1 = pixel.at[1] + tap.apart[1], p2 = pixel.at[2] + tap.apart[2];
        if ((unsigned)p0 >= IMAGE0 || (unsigned)p1 >= IMAGE1 || (unsigned)p2 >= IMAGE2) continue;
        held[i] = *(const Channels*)(image + pixel.base + p0 * X0 + p1 * X1 + p2 * X2 + tap.channel * X_CHANNEL);
    }
}

// What a thread brings of a tile of the weight.
constexpr int WEIGHED = BK * BN / 4;
constexpr int WEIGHTS = (WEIGHED + THREADS - 1) / THREADS;

inline void read_weight(Four (&held)[WEIGHTS], const T* packed, int column, int start, int depth, const Phase& phase)
{
    #pragma unroll
    for (int i = 0; i < WEIGHTS; i++) {
        #pragma unroll
        for (int j = 0; j < 4; j++) held[i].at[j] = T{};
        unsigned slot = threadIdx.x + i * THREADS;
        int d = start + (int)(slot / (BN / 4)), n = column + (int)(slot % (BN / 4)) * 4;
        if ((WEIGHED % THREADS != 0 && slot >= WEIGHED) || d >= depth || n >= OUT_PADDED) continue;
        held[i] = *(const Four*)(packed + (Index)tap_of(d, phase).row * OUT_PADDED + n);
    }
}

// Row `i` of a thread's results in the tile, and column `j`: in fours, so that the lanes of a warp read neighbouring fours of shared memory.
inline int row_of(int i) { return i / 4 * (BM / (TM / 4)) + (int)(threadIdx.x / (BN / TN)) * 4 + i % 4; }
inline int column_of(int j) { return j / 4 * (BN / (TN / 4)) + (int)(threadIdx.x % (BN / TN)) * 4 + j % 4; }

inline void store(const R (&sum)[TM][TN], O* result, R* parts, int first_pixel, int group, int column, const Phase& phase)
{
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        unsigned number = first_pixel + row_of(i);
        if (number >= PIXELS) continue;
        int o2 = (int)(number % TILED2) * STEP2 + phase.begin[2];
        number /= TILED2;
        int o1 = (int)(number % TILED1) * STEP1 + phase.begin[1];
        number /= TILED1;
        int o0 = (int)(number % TILED0) * STEP0 + phase.begin[0], n = (int)(number / TILED0);
        if (PHASES > 1 && (o0 >= RESULT0 || o1 >= RESULT1 || o2 >= RESULT2)) continue;
        O* to = result + n * Y_IMAGE + o0 * Y0 + o1 * Y1 + o2 * Y2 + group * OUT * Y_CHANNEL;
        R* part = parts + ((((Index)n * RESULT0 + o0) * RESULT1 + o1) * RESULT2 + o2) * CHANNELS + group * OUT;
        #pragma unroll
        for (int j = 0; j < TN; j += 4) {
            int c = column + column_of(j);
            if (STORE_FOURS && CHUNKS == 1) {
                if (c >= OUT) continue;
                FourResults four;
                #pragma unroll
                for (int l = 0; l < 4; l++) four.at[l] = narrow(sum[i][j + l]);
                *(FourResults*)(to + c) = four;
                continue;
            }
            #pragma unroll
            for (int l = 0; l < 4; l++) {
                if (c + l >= OUT) continue;
                if (CHUNKS > 1) part[c + l] = sum[i][j + l];
                else to[(c + l) * Y_CHANNEL] = narrow(sum[i][j + l]);
            }
        }
    }
}

inline void run(const T* __restrict__ image, const T* __restrict__ packed, O* __restrict__ result, R* __restrict__ parts)
{
    alignas(16) __shared__ R a[2][BK][BM + 4];
    alignas(16) __shared__ R b[2][BK][BN];

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
    int steps = (depth + BK - 1) / BK, share = (steps + CHUNKS - 1) / CHUNKS;
    int step = chunk * share, end = step + share < steps ? step + share : steps;

    image += group * DEPTH * X_CHANNEL;
    packed += (Index)group * TAPS * DEPTH * OUT_PADDED;
    Pixel pixels[BRINGS];
    #pragma unroll
    for (int i = 0; i < BRINGS; i++) {
        bool mine = BROUGHT % THREADS == 0 || (int)threadIdx.x + i * THREADS < BROUGHT;
        pixels[i] = pixel_of(mine ? first_pixel + slot_pixel(i) : PIXELS, phase);
    }

    Channels of_image[BRINGS];
    Four of_weight[WEIGHTS];
    auto keep = [&](int half) {
        #pragma unroll
        for (int i = 0; i < BRINGS; i++) {
            if (BROUGHT % THREADS != 0 && (int)threadIdx.x + i * THREADS >= BROUGHT) continue;
            #pragma unroll
            for (int j = 0; j < VECTOR; j++) a[half][slot_depth(i) + j][slot_pixel(i)] = widen(of_image[i].at[j]);
        }
        #pragma unroll
        for (int i = 0; i < WEIGHTS; i++) {
            unsigned slot = threadIdx.x + i * THREADS;
            if (WEIGHED % THREADS != 0 && slot >= WEIGHED) continue;
            Quad quad;
            #pragma unroll
            for (int j = 0; j < 4; j++) quad.at[j] = widen(of_weight[i].at[j]);
            *(Quad*)&b[half][slot / (BN / 4)][slot % (BN / 4) * 4] = quad;
        }
    };

    R sum[TM][TN] = {};
    if (step < end) {
        read_image(of_image, image, pixels, step * BK, depth, phase);
        read_weight(of_weight, packed, column, step * BK, depth, phase);
        keep(0);
    }
    __syncthreads();
    for (int half = 0; step < end; step++, half ^= 1) {
        bool more = step + 1 < end;
        if (more) {
            read_image(of_image, image, pixels, (step + 1) * BK, depth, phase);
            read_weight(of_weight, packed, column, (step + 1) * BK, depth, phase);
        }
        #pragma unroll UNROLLED
        for (int k = 0; k < BK; k++) {
            Quad left[TM / 4], right[TN / 4];
            #pragma unroll
            for (int i = 0; i < TM / 4; i++) left[i] = *(const Quad*)&a[half][k][row_of(4 * i)];
            #pragma unroll
            for (int j = 0; j < TN / 4; j++) right[j] = *(const Quad*)&b[half][k][column_of(4 * j)];
            #pragma unroll
            for (int i = 0; i < TM; i++)
                #pragma unroll
                for (int j = 0; j < TN; j++) sum[i][j] += left[i / 4].at[i % 4] * right[j / 4].at[j % 4];
        }
        if (more) keep(half ^ 1);
        __syncthreads();
    }
    store(sum, result, parts + (Index)chunk * PARTS, first_pixel, group, column, phase);
}
