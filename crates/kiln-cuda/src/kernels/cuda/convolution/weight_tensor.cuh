// The gradient of a convolution's weight whose products are of tensor cores. Both operands lie in shared memory as they do in memory, a pixel a row.

// A step takes ROWS pixels. Lanes that read rows of neighbours find them in different banks.
constexpr int ROWS = BK * PER_WORD, A_PITCH = BM + 8, B_PITCH = BN + 8;
static_assert(STAGE * PER_WORD == ROWS * (A_PITCH + B_PITCH), "a stage is of another size");

// Rows between those that a thread copies a vector of.
constexpr int A_RAISE = THREADS / (BM / VECTOR), B_RAISE = THREADS / (BN / VECTOR);
static_assert(ROWS % A_RAISE == 0 && ROWS % B_RAISE == 0, "threads have different numbers of rows");

// Pixels are the depth, so a product reads both operands across their rows: element by element in f32, in transposed matrices of 8 by 8 in 16 bits.
inline void multiply_words(float (&sum)[MT][NT][4], const float* stage)
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

inline void multiply_halves(float (&sum)[MT][NT][4], const T* stage)
{
    // Lane 8 i + r says where row r of matrix i is: of the left operand channels come in eights first, of the right one pixels.
    int lane = threadIdx.x % 32, r = lane % 8, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    const T* a = stage + (high + r) * A_PITCH + warp_row() + low;
    const T* b = stage + ROWS * A_PITCH + (low + r) * B_PITCH + warp_column() + high;
    #pragma unroll
    for (int k = 0; k < ROWS; k += 16) {
        float left[MT][4], right[NT / 2][4];
        #pragma unroll
        for (int m = 0; m < MT; m++) load_transposed(left[m], a + k * A_PITCH + 16 * m);
        #pragma unroll
        for (int n = 0; n < NT / 2; n++) load_transposed(right[n], b + k * B_PITCH + 16 * n);
        #pragma unroll
        for (int m = 0; m < MT; m++)
            #pragma unroll
            for (int n = 0; n < NT / 2; n++) {
                multiply_fragments(sum[m][2 * n], left[m], right[n][0], right[n][1]);
                multiply_fragments(sum[m][2 * n + 1], left[m], right[n][2], right[n][3]);
            }
    }
}

inline void multiply(float (&sum)[MT][NT][4], const float* stage)
{
    if (PER_WORD == 1) multiply_words(sum, stage);
    else multiply_halves(sum, (const T*)stage);
}

inline void run(const T* __restrict__ image, const T* __restrict__ gradient, O* __restrict__ result, float* __restrict__ parts)
{
    unsigned block = blockIdx.x;
    int first_column = block % COLUMN_TILES * BN;
    block /= COLUMN_TILES;
    int first_row = block % ROW_TILES * BM;
    block /= ROW_TILES;
    int group = block % GROUPS, chunk = block / GROUPS;
    int start = chunk * SHARE, end = start + SHARE < PIXELS ? start + SHARE : PIXELS;

    int a_own = threadIdx.x / (BM / VECTOR), a_place = threadIdx.x % (BM / VECTOR) * VECTOR;
    int b_own = threadIdx.x / (BN / VECTOR), b_place = threadIdx.x % (BN / VECTOR) * VECTOR;
    image += group * DEPTH;
    gradient += group * OUT;
    bool channels = first_row + a_place < OUT;
    Column column = column_of_image(first_column + b_place);
    Index apart = first_column + b_place < COLUMNS
        ? column.apart[0] * X0 + column.apart[1] * X1 + column.apart[2] * X2 + column.channel : 0;

    auto fetch = [&](float* words, int step) {
        T* stage = (T*)words;
        int first = start + step * ROWS;
        #pragma unroll
        for (int i = 0; i < ROWS / A_RAISE; i++) {
            int row = a_own + i * A_RAISE, number = first + row;
            bool inside = channels && number < end;
            Index at = 0;
            if (inside && G_PIXEL > 0) {
                at = number * G_PIXEL;
            } else if (inside) {
                Pixel pixel = pixel_of(number);
                at = pixel.image * G_IMAGE + pixel.at[0] * G0 + pixel.at[1] * G1 + pixel.at[2] * G2;
            }
            copy_vector(stage + row * A_PITCH + a_place, gradient + (inside ? at + first_row + a_place : 0), inside);
        }
        #pragma unroll
        for (int i = 0; i < ROWS / B_RAISE; i++) {
            int row = b_own + i * B_RAISE, number = first + row;
            Pixel pixel = pixel_of(number);
            int q0 = pixel.at[0] * STRIDE0, q1 = pixel.at[1] * STRIDE1, q2 = pixel.at[2] * STRIDE2;
            bool inside = number < end && (unsigned)(q0 + column.apart[0]) < IMAGE0 && (unsigned)(q1 + column.apart[1]) < IMAGE1
                && (unsigned)(q2 + column.apart[2]) < IMAGE2;
            Index at = inside ? pixel.image * X_IMAGE + q0 * X0 + q1 * X1 + q2 * X2 + apart : 0;
            copy_vector(stage + ROWS * A_PITCH + row * B_PITCH + b_place, image + at, inside);
        }
    };
    float sum[MT][NT][4] = {};
    pipeline(0, (end - start + ROWS - 1) / ROWS, fetch, [&](const float* stage) { multiply(sum, stage); });

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
                for (int i = 0; i < 2; i++) result[(at * DEPTH + (c + i) % DEPTH) * TAPS + (c + i) / DEPTH] = narrow(pair.at[i]);
            }
        }
    }
}
