// The gradient of a convolution's weight whose products are of tensor cores. Both operands lie in shared memory as they do in memory, a pixel a row.

// Lanes that read four rows of eight neighbours find them in different banks.
constexpr int A_PITCH = BM + 8, B_PITCH = BN + 8;
static_assert(STAGE == BK * (A_PITCH + B_PITCH), "a stage is of another size");

// Rows between those that a thread copies four elements of.
constexpr int A_RAISE = THREADS / (BM / 4), B_RAISE = THREADS / (BN / 4);
static_assert(BK % A_RAISE == 0 && BK % B_RAISE == 0, "threads have different numbers of rows");

inline void multiply(float (&sum)[MT][NT][4], const float* stage)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const float* a = stage + t * A_PITCH + warp_row() + g;
    const float* b = stage + BK * A_PITCH + t * B_PITCH + warp_column() + g;
    #pragma unroll
    for (int k = 0; k < BK; k += 8) {
        float left[MT][4], right[NT][2];
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int i = 0; i < 4; i++) left[m][i] = rounded(a[(k + i / 2 * 4) * A_PITCH + 16 * m + i % 2 * 8]);
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int i = 0; i < 2; i++) right[n][i] = rounded(b[(k + i * 4) * B_PITCH + 8 * n]);
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int n = 0; n < NT; n++) multiply_fragments(sum[m][n], left[m], right[n][0], right[n][1]);
    }
}

inline void run(const float* __restrict__ image, const float* __restrict__ gradient, float* __restrict__ result, float* __restrict__ parts)
{
    unsigned block = blockIdx.x;
    int first_column = block % COLUMN_TILES * BN;
    block /= COLUMN_TILES;
    int first_row = block % ROW_TILES * BM;
    block /= ROW_TILES;
    int group = block % GROUPS, chunk = block / GROUPS;
    int start = chunk * SHARE, end = start + SHARE < PIXELS ? start + SHARE : PIXELS;

    int a_own = threadIdx.x / (BM / 4), a_place = threadIdx.x % (BM / 4) * 4;
    int b_own = threadIdx.x / (BN / 4), b_place = threadIdx.x % (BN / 4) * 4;
    image += group * DEPTH;
    gradient += group * OUT;
    bool channels = first_row + a_place < OUT;
    Column column = column_of_image(first_column + b_place);
    Index apart = first_column + b_place < COLUMNS
        ? column.apart[0] * X0 + column.apart[1] * X1 + column.apart[2] * X2 + column.channel : 0;

    auto fetch = [&](float* stage, int step) {
        int first = start + step * BK;
        #pragma unroll
        for (int i = 0; i < BK / A_RAISE; i++) {
            int row = a_own + i * A_RAISE, number = first + row;
            bool inside = channels && number < end;
            Index at = 0;
            if (inside && G_PIXEL > 0) {
                at = number * G_PIXEL;
            } else if (inside) {
                Pixel pixel = pixel_of(number);
                at = pixel.image * G_IMAGE + pixel.at[0] * G0 + pixel.at[1] * G1 + pixel.at[2] * G2;
            }
            copy_four(stage + row * A_PITCH + a_place, gradient + (inside ? at + first_row + a_place : 0), inside);
        }
        #pragma unroll
        for (int i = 0; i < BK / B_RAISE; i++) {
            int row = b_own + i * B_RAISE, number = first + row;
            Pixel pixel = pixel_of(number);
            int q0 = pixel.at[0] * STRIDE0, q1 = pixel.at[1] * STRIDE1, q2 = pixel.at[2] * STRIDE2;
            bool inside = number < end && (unsigned)(q0 + column.apart[0]) < IMAGE0 && (unsigned)(q1 + column.apart[1]) < IMAGE1
                && (unsigned)(q2 + column.apart[2]) < IMAGE2;
            Index at = inside ? pixel.image * X_IMAGE + q0 * X0 + q1 * X1 + q2 * X2 + apart : 0;
            copy_four(stage + BK * A_PITCH + row * B_PITCH + b_place, image + at, inside);
        }
    };
    float sum[MT][NT][4] = {};
    pipeline(0, (end - start + BK - 1) / BK, fetch, [&](const float* stage) { multiply(sum, stage); });

    #pragma unroll
    for (int row = 0; row < 2 * MT; row++) {
        int m = row / 2, half = row % 2, channel = first_row + row_of(m, half);
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            int c = first_column + column_of(n);
            if (channel >= OUT || c >= COLUMNS) continue;
            Index at = group * OUT + channel;
            Pair pair = { { sum[m][n][2 * half], sum[m][n][2 * half + 1] } };
            if (CHUNKS > 1) {
                *(Pair*)(parts + chunk * (Index)PARTS + at * COLUMNS + c) = pair;
            } else {
                #pragma unroll
                for (int i = 0; i < 2; i++) result[(at * DEPTH + (c + i) % DEPTH) * TAPS + (c + i) / DEPTH] = pair.at[i];
            }
        }
    }
}
