inline void read_gradient(OfGradient (&held)[G_BRINGS], const T* gradient, int row, int start, int end)
{
    #pragma unroll
    for (int i = 0; i < G_BRINGS; i++) {
        #pragma unroll
        for (int j = 0; j < G_VECTOR; j++) held[i].at[j] = T{};
        int number = start + g_pixel(i), channel = row + g_column(i);
        if (!g_mine(i) || number >= end || channel >= OUT) continue;
        Index at;
        if (G_PIXEL > 0) {
            at = number * G_PIXEL;
        } else {
            Pixel pixel = pixel_of(number);
            at = pixel.image * G_IMAGE + pixel.at[0] * G0 + pixel.at[1] * G1 + pixel.at[2] * G2;
        }
        held[i] = *(const OfGradient*)(gradient + at + channel * G_CHANNEL);
    }
}

inline void read_image(OfImage (&held)[X_BRINGS], const T* image, const Column (&columns)[X_BRINGS], int start, int end)
{
    #pragma unroll
    for (int i = 0; i < X_BRINGS; i++) {
        #pragma unroll
        for (int j = 0; j < X_VECTOR; j++) held[i].at[j] = T{};
        int number = start + x_pixel(i);
        if (number >= end) continue;
        Pixel pixel = pixel_of(number);
        const Column& column = columns[i];
        int p0 = pixel.at[0] * STRIDE0 + column.apart[0], p1 = pixel.at[1] * STRIDE1 + column.apart[1];
        int p2 = pixel.at[2] * STRIDE2 + column.apart[2];
        if ((unsigned)p0 >= IMAGE0 || (unsigned)p1 >= IMAGE1 || (unsigned)p2 >= IMAGE2) continue;
        held[i] = *(const OfImage*)(image + pixel.image * X_IMAGE + p0 * X0 + p1 * X1 + p2 * X2 + column.channel);
    }
}

// Row `i` of a thread's results in the tile, and column `j`: in fours, so that the lanes of a warp read neighbouring fours of shared memory.
inline int row_of(int i) { return i / 4 * (BM / (TM / 4)) + (int)(threadIdx.x / (BN / TN)) * 4 + i % 4; }
inline int column_of(int j) { return j / 4 * (BN / (TN / 4)) + (int)(threadIdx.x % (BN / TN)) * 4 + j % 4; }

inline void run(const T* __restrict__ image, const T* __restrict__ gradient, O* __restrict__ result, R* __restrict__ parts)
{
    alignas(16) __shared__ R a[2][BK][BM + 4];
    alignas(16) __shared__ R b[2][BK][BN + 4];

    unsigned block = blockIdx.x;
    int first_column = block % COLUMN_TILES * BN;
    block /= COLUMN_TILES;
    int first_row = block % ROW_TILES * BM;
    block /= ROW_TILES;
    int group = block % GROUPS, chunk = block / GROUPS;
    int start = chunk * SHARE, end = start + SHARE < PIXELS ? start + SHARE : PIXELS;

    image += group * DEPTH * X_CHANNEL;
    gradient += group * OUT * G_CHANNEL;
    Column columns[X_BRINGS];
    #pragma unroll
    for (int i = 0; i < X_BRINGS; i++) columns[i] = column_of_image(x_mine(i) ? first_column + x_column(i) : COLUMNS);

    OfGradient of_gradient[G_BRINGS];
    OfImage of_image[X_BRINGS];
    auto keep = [&](int half) {
        #pragma unroll
        for (int i = 0; i < G_BRINGS; i++) {
            #pragma unroll
            for (int j = 0; j < G_VECTOR; j++)
                if (g_mine(i)) a[half][g_pixel(i)][g_column(i) + j] = widen(of_gradient[i].at[j]);
        }
        #pragma unroll
        for (int i = 0; i < X_BRINGS; i++) {
            #pragma unroll
            for (int j = 0; j < X_VECTOR; j++)
                if (x_mine(i)) b[half][x_pixel(i)][x_column(i) + j] = widen(of_image[i].at[j]);
        }
    };

    R sum[TM][TN] = {};
    read_gradient(of_gradient, gradient, first_row, start, end);
    read_image(of_image, image, columns, start, end);
    keep(0);
    __syncthreads();
    for (int half = 0; start < end; start += BK, half ^= 1) {
        bool more = start + BK < end;
        if (more) {
            read_gradient(of_gradient, gradient, first_row, start + BK, end);
            read_image(of_image, image, columns, start + BK, end);
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

    #pragma unroll
    for (int i = 0; i < TM; i++) {
        int channel = first_row + row_of(i);
        #pragma unroll
        for (int j = 0; j < TN; j++) {
            int column = first_column + column_of(j);
            if (channel >= OUT || column >= COLUMNS) continue;
            Index row = group * OUT + channel;
            if (CHUNKS > 1) parts[chunk * (Index)PARTS + row * COLUMNS + column] = sum[i][j];
            else result[(row * DEPTH + column % DEPTH) * TAPS + column / DEPTH] = narrow(sum[i][j]);
        }
    }
}
