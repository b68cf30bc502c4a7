// Products of f32 on tensor cores: operands are rounded to 10 bits of fraction (TF32), sums are f32.
//
// A product takes 16 x 8 elements of a left operand, 8 x 8 of a right one, and adds to 16 x 8 sums. With g = lane / 4 and t = lane % 4 a lane has:
//
//     left   rows g and g + 8 at column t, then the same rows at column t + 4
//     right  column g at rows t and t + 4
//     sums   row g at columns 2 t and 2 t + 1, then row g + 8 at the same columns
//
// The host's versions follow this table lane by lane, so that tests run the kernels as they are.

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
    for (float& x : mine) x = __uint_as_float(__float_as_uint(x) & ~0x1fffu);
    const auto lanes = gather(mine);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 8; k++)
            sum[i] += lanes[4 * g + k % 4][i / 2 + k / 4 * 2] * lanes[4 * (2 * t + i % 2) + k % 4][4 + k / 4];
}

inline void copy_four(float* to, const float* from, bool inside)
{
    for (int i = 0; i < 4; i++) to[i] = inside ? from[i] : 0;
}

inline void end_of_copies() {}

template <int LATEST> void wait_for_copies() {}

#else

// To the nearest number with 10 bits of fraction; halves are rounded away from zero.
inline float rounded(float x)
{
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

// sum += left right, of operands that are rounded.
inline void multiply_fragments(float (&sum)[4], const float (&left)[4], float low, float high)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(left[0])), "r"(__float_as_uint(left[1])), "r"(__float_as_uint(left[2])),
          "r"(__float_as_uint(left[3])), "r"(__float_as_uint(low)), "r"(__float_as_uint(high)));
}

// Begins to copy four elements into shared memory; zeros if what is to be copied is not inside.
inline void copy_four(float* to, const float* from, bool inside)
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
