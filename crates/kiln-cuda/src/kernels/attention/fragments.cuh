// Tensor cores: fragments of matrices in the registers of a warp, and asynchronous copies into shared memory.
//
// A product takes 16 x 16 elements of a left operand (four registers of two elements), 16 x 8 of a right one (two registers)
// and adds to 16 x 8 sums of f32 (four). With g = lane / 4 and t = lane % 4 a lane has, two neighbours in a register:
//
//     left   rows g and g + 8 at columns 2 t of the left half, then the same rows at columns 2 t of the right half
//     right  column g, rows 2 t of the upper half, then of the lower half
//     sums   rows g and g + 8, columns 2 t and 2 t + 1
//
// Elements of f32 are rounded to TF32, which has 10 bits of fraction. A product then takes 16 x 8 of a left operand (four registers of one
// element) and 8 x 8 of a right one (two registers):
//
//     left   rows g and g + 8 at column t of the left half, then the same rows at column t of the right half
//     right  column g, row t of the upper half, then of the lower half
//     sums   as above
//
// A row of a half is 16 bytes of both kinds, so one instruction loads the fragments of both.
//
// The host's versions follow these tables lane by lane, so that tests run the kernels as they are.

// Elements in shared memory. HALF of them, 16 bytes, are a row of half a fragment; a lane has WORDS registers of what was
// a fragment of sums and becomes a left operand.
template <class T> struct kiln_fragment_of {
    typedef unsigned short element;
    static constexpr int HALF = 8, WORDS = 2;
    static constexpr bool ROUNDED = false;
};

// f32 as TF32: elements are rounded in shared memory, once for all that read them.
template <> struct kiln_fragment_of<float> {
    typedef float element;
    static constexpr int HALF = 4, WORDS = 4;
    static constexpr bool ROUNDED = true;
};

#ifdef KILN_HOST

inline float kiln_fragment_power(float x) { return exp2f(x); }

// Gives the lanes of a warp what each of them has, until the next call.
template <class T, int N> const T (*kiln_fragment_gather(const T (&mine)[N]))[N]
{
    __shared__ T all[1024][N];
    // Nobody writes before everybody has read what was there.
    __syncwarp();
    for (int i = 0; i < N; i++) all[threadIdx.x][i] = mine[i];
    __syncwarp();
    return &all[threadIdx.x / 32 * 32];
}

// Rounds to TF32, ties away from zero.
inline float kiln_fragment_round(float x)
{
    const kiln_u32 bits = __float_as_uint(x);
    return x != x ? x : __uint_as_float((bits + 0x1000) & ~0x1fffu);
}

inline void kiln_fragment_load(kiln_u32 (&to)[4], const void* row)
{
    typedef const unsigned char* pointer;
    const pointer mine[1] = { (pointer)row };
    const auto rows = kiln_fragment_gather(mine);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) {
        const pointer from = rows[8 * i + lane / 4][0] + 4 * (lane % 4);
        to[i] = from[0] | (kiln_u32)from[1] << 8 | (kiln_u32)from[2] << 16 | (kiln_u32)from[3] << 24;
    }
}

inline void kiln_fragment_load_turned(kiln_u32 (&to)[4], const unsigned short* row)
{
    typedef const unsigned short* pointer;
    const pointer mine[1] = { row };
    const auto rows = kiln_fragment_gather(mine);
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++)
        to[i] = rows[8 * i + 2 * (lane % 4)][0][lane / 4]
            | (kiln_u32)rows[8 * i + 2 * (lane % 4) + 1][0][lane / 4] << 16;
}

template <class T> void kiln_fragment_product(float (&sum)[4], const kiln_u32 (&left)[4], kiln_u32 low, kiln_u32 high)
{
    const kiln_u32 mine[6] = { left[0], left[1], left[2], left[3], low, high };
    const auto lanes = kiln_fragment_gather(mine);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // Element k of a row or column: half, lane, and which of the two in its register.
    auto element = [&](int lane, int register_of_half, int stride, int k) {
        const kiln_u32 word = lanes[4 * lane + k % 8 / 2][register_of_half + stride * (k / 8)];
        return kiln_widen(T { (kiln_u16)(word >> (16 * (k % 2))) });
    };
    for (int k = 0; k < 16; k++) {
        const float rows[2] = { element(g, 0, 2, k), element(g, 1, 2, k) };
        const float columns[2] = { element(2 * t, 4, 1, k), element(2 * t + 1, 4, 1, k) };
        for (int i = 0; i < 4; i++) sum[i] += rows[i / 2] * columns[i % 2];
    }
}

// The instruction does not look at the 13 bits that TF32 has not.
template <>
inline void kiln_fragment_product<float>(float (&sum)[4], const kiln_u32 (&left)[4], kiln_u32 low, kiln_u32 high)
{
    const kiln_u32 mine[6] = { left[0], left[1], left[2], left[3], low, high };
    const auto lanes = kiln_fragment_gather(mine);
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto element = [&](int lane, int register_of_half, int stride, int k) {
        return __uint_as_float(lanes[4 * lane + k % 4][register_of_half + stride * (k / 4)] & ~0x1fffu);
    };
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 8; k++) sum[i] += element(g, i / 2, 2, k) * element(2 * t + i % 2, 4, 1, k);
}

template <class E> void kiln_copy(E* to, const void* from, bool inside)
{
    for (int i = 0; i < (int)(16 / sizeof(E)); i++) to[i] = inside ? ((const E*)from)[i] : (E)0;
}

inline void kiln_copies_end_group() {}

inline void kiln_copies_wait() {}

#else

// Two to the power of x, zero where that is not normal.
inline float kiln_fragment_power(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounds to TF32, ties away from zero.
inline float kiln_fragment_round(float x)
{
    kiln_u32 bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}

// Four matrices of 8 rows of 16 bytes: lane 8 i + r says where row r of matrix i is. A lane gets word lane % 4 of row lane / 4: two
// elements of 16 bits, or one of 32.
inline void kiln_fragment_load(kiln_u32 (&to)[4], const void* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((kiln_u32)__cvta_generic_to_shared(row)));
}

// The same of the transposed matrices, of elements of 16 bits.
inline void kiln_fragment_load_turned(kiln_u32 (&to)[4], const unsigned short* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"((kiln_u32)__cvta_generic_to_shared(row)));
}

// sum += left right.
template <class T> void kiln_fragment_product(float (&sum)[4], const kiln_u32 (&left)[4], kiln_u32 low, kiln_u32 high);

template <>
inline void kiln_fragment_product<kiln_bf16>(float (&sum)[4], const kiln_u32 (&left)[4], kiln_u32 low, kiln_u32 high)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
}

template <>
inline void kiln_fragment_product<kiln_f16>(float (&sum)[4], const kiln_u32 (&left)[4], kiln_u32 low, kiln_u32 high)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
}

template <>
inline void kiln_fragment_product<float>(float (&sum)[4], const kiln_u32 (&left)[4], kiln_u32 low, kiln_u32 high)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
}

// Begins to copy 16 bytes into shared memory; zeros if what is to be copied is not inside.
inline void kiln_copy(void* to, const void* from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((kiln_u32)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}

inline void kiln_copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all copies of this thread. Those of others are there behind the next barrier.
inline void kiln_copies_wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

#endif

// Elements between rows in shared memory: eight rows begin in different banks.
template <class T> constexpr int kiln_fragment_pitch(int width) { return width + kiln_fragment_of<T>::HALF; }

// sum[m][n] += 16 MT rows of `a`, times 8 NT rows of `b`, of WIDTH columns each: inner products of rows.
template <class T, int MT, int NT, int WIDTH, class E>
void kiln_fragment_dot(float (&sum)[MT][NT][4], const E* a, const E* b)
{
    constexpr int PITCH = kiln_fragment_pitch<T>(WIDTH), HALF = kiln_fragment_of<T>::HALF;
    const int lane = threadIdx.x % 32;
    a += lane % 16 * PITCH + lane / 16 * HALF;
    b += (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * HALF;
    #pragma unroll
    for (int k = 0; k < WIDTH; k += 2 * HALF) {
        kiln_u32 left[MT][4];
        #pragma unroll
        for (int m = 0; m < MT; m++) kiln_fragment_load(left[m], a + 16 * m * PITCH + k);
        #pragma unroll
        for (int n = 0; n < NT; n += 2) {
            kiln_u32 right[4];
            kiln_fragment_load(right, b + 8 * n * PITCH + k);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                kiln_fragment_product<T>(sum[m][n], left[m], right[0], right[1]);
                kiln_fragment_product<T>(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// What a lane has of a row of sums, as words of a left operand; `half` is 0 for row g and 1 for row g + 8.
template <class T> void kiln_fragment_weigh(kiln_u32 (&to)[2], int half, float low, float high)
{
    to[half] = kiln_pack<T>(low, high);
}

template <class T> void kiln_fragment_weigh(kiln_u32 (&to)[4], int half, float low, float high)
{
    to[2 * half] = __float_as_uint(kiln_fragment_round(low));
    to[2 * half + 1] = __float_as_uint(kiln_fragment_round(high));
}

// sum[m][c] += weights, packed sums of a product with 8 NT columns, times 8 NT rows of `b` with WIDTH columns. The two columns that
// a lane has of sums are the two that it has of a left operand, so weights stay where they are.
template <class T, int MT, int NT, int WIDTH>
void kiln_fragment_combine(
    float (&sum)[MT][WIDTH / 8][4], const kiln_u32 (&weights)[MT][NT][2], const unsigned short* b)
{
    constexpr int PITCH = kiln_fragment_pitch<T>(WIDTH);
    const int lane = threadIdx.x % 32;
    b += lane % 16 * PITCH + lane / 16 * 8;
    #pragma unroll
    for (int n = 0; n < NT; n += 2) {
        #pragma unroll
        for (int c = 0; c < WIDTH / 8; c += 2) {
            kiln_u32 right[4];
            kiln_fragment_load_turned(right, b + 8 * n * PITCH + 8 * c);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                const kiln_u32 left[4] = { weights[m][n][0], weights[m][n][1], weights[m][n + 1][0],
                    weights[m][n + 1][1] };
                kiln_fragment_product<T>(sum[m][c], left, right[0], right[1]);
                kiln_fragment_product<T>(sum[m][c + 1], left, right[2], right[3]);
            }
        }
    }
}

// The same in TF32. A lane has columns 2 t and 2 t + 1 of sums, but columns t and t + 4 of a left operand. The order of the eight products
// that are added is free, so both operands are taken in the order 0, 2, 4, 6, 1, 3, 5, 7: column 2 t of the sums is column t of the left
// operand, column 2 t + 1 is column t + 4, and rows 2 t and 2 t + 1 of `b` go with them. The words that the lanes of a warp read of such rows are
// in different banks: two rows are 8 or 24 banks apart, and each row has 8 neighbours.
template <class T, int MT, int NT, int WIDTH>
void kiln_fragment_combine(float (&sum)[MT][WIDTH / 8][4], const kiln_u32 (&weights)[MT][NT][4], const float* b)
{
    constexpr int PITCH = kiln_fragment_pitch<T>(WIDTH);
    const int lane = threadIdx.x % 32;
    b += lane % 4 * 2 * PITCH + lane / 4;
    #pragma unroll
    for (int n = 0; n < NT; n++) {
        #pragma unroll
        for (int c = 0; c < WIDTH / 8; c++) {
            const float* right = b + 8 * n * PITCH + 8 * c;
            const kiln_u32 low = __float_as_uint(right[0]), high = __float_as_uint(right[PITCH]);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                const kiln_u32 left[4] = { weights[m][n][0], weights[m][n][2], weights[m][n][1], weights[m][n][3] };
                kiln_fragment_product<T>(sum[m][c], left, low, high);
            }
        }
    }
}

template <class C, int ROWS, int WIDTH> int kiln_attention_element(int row, int column);

// Begins to copy ROWS rows from `first` of a head with `rows` rows into shared memory, WIDTH columns each; zeros behind the last row and column.
template <class C, class V, int ROWS, int WIDTH, class T, class E>
void kiln_fragment_fetch(E* to, const T* head, int first, int rows)
{
    constexpr int HALF = kiln_fragment_of<T>::HALF, PARTS = WIDTH / HALF, STEP = C::THREADS / PARTS;
    // Where all of a thread's parts are at one column of rows that are STEP apart, they are as far apart in memory.
    if constexpr (C::whole && C::THREADS % PARTS == 0 && ROWS % STEP == 0 && (!C::WARPGROUPS || STEP % 8 == 0)) {
        const int line = threadIdx.x / PARTS, column = threadIdx.x % PARTS * HALF;
        E* place = to + kiln_attention_element<C, ROWS, WIDTH>(line, column);
        const T* from = head + kiln_attention_place<V>(first + line, column);
        #pragma unroll
        for (int i = 0; i < ROWS / STEP; i++)
            kiln_copy(place + i * STEP * (C::WARPGROUPS ? 64 : kiln_fragment_pitch<T>(WIDTH)), from + i * (STEP * (long long)V::row), true);
        return;
    }
    #pragma unroll
    for (int begin = 0; begin < ROWS * PARTS; begin += C::THREADS) {
        const int at = begin + threadIdx.x;
        if (ROWS * PARTS % C::THREADS != 0 && at >= ROWS * PARTS) break;
        const int row = at / PARTS, column = at % PARTS * HALF;
        const bool inside = C::whole || (first + row < rows && (WIDTH == V::columns || column < V::columns));
        const T* from = head + (inside ? kiln_attention_place<V>(first + row, column) : 0);
        kiln_copy(to + kiln_attention_element<C, ROWS, WIDTH>(row, column), from, inside);
    }
}

// Rounds what this thread has copied with kiln_fragment_fetch, where elements are rounded: it sees its own copies before the
// barrier that shows them to others.
template <class C, int ROWS, int WIDTH> void kiln_fragment_settle(unsigned short*) {}

template <class C, int ROWS, int WIDTH> void kiln_fragment_settle(float* copied)
{
    constexpr int PARTS = WIDTH / 4;
    #pragma unroll
    for (int begin = 0; begin < ROWS * PARTS; begin += C::THREADS) {
        const int at = begin + threadIdx.x;
        if (ROWS * PARTS % C::THREADS != 0 && at >= ROWS * PARTS) break;
        float* part = copied + at / PARTS * kiln_fragment_pitch<float>(WIDTH) + at % PARTS * 4;
        auto four = *(kiln_attention_lanes<float, 4>*)part;
        #pragma unroll
        for (int lane = 0; lane < 4; lane++) four.at[lane] = kiln_fragment_round(four.at[lane]);
        *(kiln_attention_lanes<float, 4>*)part = four;
    }
}

// Two neighbours of a row, at once where that may be.
template <class V, class T> void kiln_fragment_write(T* to, float low, float high)
{
    const kiln_u32 both = kiln_pack<T>(low, high);
    if (V::vectors) {
        *(kiln_u32*)to = both;
    } else {
        to[0].bits = (kiln_u16)both;
        to[kiln_attention_place<V>(0, 1)].bits = (kiln_u16)(both >> 16);
    }
}

template <class V> void kiln_fragment_write(float* to, float low, float high)
{
    if (V::vectors) {
        *(kiln_attention_lanes<float, 2>*)to = { low, high };
    } else {
        to[0] = low;
        to[kiln_attention_place<V>(0, 1)] = high;
    }
}

// Stores what a lane has of a row of sums, each times `factor`; `half` is 0 for row g and 1 for row g + 8.
template <class V, int WIDTH, class T>
void kiln_fragment_store(T* head, int row, const float (&sum)[WIDTH / 8][4], int half, float factor)
{
    #pragma unroll
    for (int c = 0; c < V::columns / 8; c++)
        kiln_fragment_write<V>(head + kiln_attention_place<V>(row, 8 * c + threadIdx.x % 4 * 2),
            sum[c][2 * half] * factor, sum[c][2 * half + 1] * factor);
}
