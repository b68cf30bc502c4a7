// Products on tensor cores: operands of f32 are rounded to 10 bits of fraction (TF32), those of 16 bits are as they are; sums are f32.
//
// Shared memory and registers hold *words* of four bytes, each with PER_WORD neighbouring elements: one of f32, or two of 16 bits. A product takes 16 x 8
// words of a left operand, 8 x 8 of a right one, and adds to 16 x 8 sums. With g = lane / 4 and t = lane % 4 a lane has:
//
//     left   rows g and g + 8 at word t, then the same rows at word t + 4
//     right  column g at words t and t + 4
//     sums   row g at columns 2 t and 2 t + 1, then row g + 8 at the same columns
//
// The host's versions follow this table lane by lane, so that tests run the kernels as they are.

// A word's bits travel as those of an f32, whose number nobody looks at where they are two elements.
struct alignas(4) Word { T at[PER_WORD]; };

// Elements that are copied together, 16 bytes.
constexpr int VECTOR = 4 * PER_WORD;

#ifdef KILN_HOST

// Gives the lanes of a warp what each of them has, until the next call.
template <class V, int N> const V (*gather(const V (&mine)[N]))[N]
{
    __shared__ V all[THREADS][N];
    // Nobody writes before everybody has read what was there.
    __syncwarp();
    for (int i = 0; i < N; i++) all[threadIdx.x][i] = mine[i];
    __syncwarp();
    return &all[threadIdx.x / 32 * 32];
}

inline float rounded(float x)
{
    if (PER_WORD > 1) return x;
    unsigned bits = __float_as_uint(x);
    // Infinities and NaN stay. Halves are rounded away from zero.
    if ((bits & 0x7f800000u) == 0x7f800000u) return x;
    return __uint_as_float((bits + 0x1000u) & ~0x1fffu);
}

inline void load_fragment(float (&to)[4], const float* row)
{
    const float* const mine[1] = { row };
    const auto rows = gather(mine);
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) to[i] = rows[8 * i + lane / 4][0][lane % 4];
}

inline void multiply_fragments(float (&sum)[4], const float (&left)[4], float low, float high)
{
    float mine[6] = { left[0], left[1], left[2], left[3], low, high };
    // Bits beyond the fraction are not read.
    for (float& x : mine) x = PER_WORD > 1 ? x : __uint_as_float(__float_as_uint(x) & ~0x1fffu);
    const auto lanes = gather(mine);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int k = 0; k < 8; k++) {
        Word rows[2], columns[2];
        for (int i = 0; i < 2; i++) {
            __builtin_memcpy(&rows[i], &lanes[4 * g + k % 4][i + k / 4 * 2], 4);
            __builtin_memcpy(&columns[i], &lanes[4 * (2 * t + i) + k % 4][4 + k / 4], 4);
        }
        for (int j = 0; j < PER_WORD; j++) {
            const float row[2] = { widen(rows[0].at[j]), widen(rows[1].at[j]) };
            const float column[2] = { widen(columns[0].at[j]), widen(columns[1].at[j]) };
            for (int i = 0; i < 4; i++) sum[i] += row[i / 2] * column[i % 2];
        }
    }
}

inline void load_transposed(float (&to)[4], const T* row)
{
    const T* const mine[1] = { row };
    const auto rows = gather(mine);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++) {
        Word word;
        for (int j = 0; j < PER_WORD; j++) word.at[j] = rows[8 * i + t * PER_WORD + j][0][g];
        __builtin_memcpy(&to[i], &word, 4);
    }
}

inline void copy_vector(void* to, const T* from, bool inside)
{
    if (inside) __builtin_memcpy(to, from, 16);
    else __builtin_memset(to, 0, 16);
}

inline void end_of_copies() {}

template <int LATEST> void wait_for_copies() {}

#else

// To the nearest number with 10 bits of fraction; halves are rounded away from zero.
inline float rounded(float x)
{
    if (PER_WORD > 1) return x;
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return __uint_as_float(bits);
}

// Four matrices of 8 rows of 4 elements: lane 8 i + r says where row r of matrix i is. A lane gets element lane % 4 of row lane / 4.
inline void load_fragment(float (&to)[4], const float* row)
{
    unsigned bits[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
    #pragma unroll
    for (int i = 0; i < 4; i++) to[i] = __uint_as_float(bits[i]);
}

// The same of matrices of 16 bits, each transposed: a lane gets row lane / 4 of the elements of rows 2 (lane % 4) and the next in memory.
inline void load_transposed(float (&to)[4], const T* row)
{
    unsigned bits[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                 : "r"((unsigned)__cvta_generic_to_shared(row))
                 : "memory");
    #pragma unroll
    for (int i = 0; i < 4; i++) to[i] = __uint_as_float(bits[i]);
}

// sum += left right, of operands that are rounded.
#define KILN_MULTIPLY(kind)                                                                                                       \
    asm("mma.sync.aligned." kind " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                              \
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                                 \
        : "r"(__float_as_uint(left[0])), "r"(__float_as_uint(left[1])), "r"(__float_as_uint(left[2])),                           \
          "r"(__float_as_uint(left[3])), "r"(__float_as_uint(low)), "r"(__float_as_uint(high)))

inline void multiply_fragments(float (&sum)[4], const float (&left)[4], float low, float high)
{
    if (PER_WORD == 1) KILN_MULTIPLY("m16n8k8.row.col.f32.tf32.tf32.f32");
    else if (IS_BF16) KILN_MULTIPLY("m16n8k16.row.col.f32.bf16.bf16.f32");
    else KILN_MULTIPLY("m16n8k16.row.col.f32.f16.f16.f32");
}

#undef KILN_MULTIPLY

// Begins to copy a vector into shared memory; zeros if what is to be copied is not inside.
inline void copy_vector(void* to, const T* from, bool inside)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
}

// Ends a group of copies.
inline void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's copies but those of the latest groups. Those of others are there behind the next barrier.
template <int LATEST> void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LATEST) : "memory"); }

#endif
