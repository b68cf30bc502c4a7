// Reductions over groups of threads, in an order that depends on the size of the group alone.
//
// A group is 1, 2, 4, .., 32 neighbouring threads of a warp, or some neighbouring warps. Every thread of the
// block takes part.

struct kiln_by_sum {
    template <class T> static inline T join(T a, T b) { return kiln_add(a, b); }
    static inline float join(float a, float b) { return a + b; }
    static inline double join(double a, double b) { return a + b; }
};
struct kiln_by_prod {
    template <class T> static inline T join(T a, T b) { return kiln_mul(a, b); }
    static inline float join(float a, float b) { return a * b; }
    static inline double join(double a, double b) { return a * b; }
};
struct kiln_by_max {
    template <class T> static inline T join(T a, T b) { return kiln_larger(a, b); }
};
struct kiln_by_min {
    template <class T> static inline T join(T a, T b) { return kiln_smaller(a, b); }
};
struct kiln_by_any {
    static inline bool join(bool a, bool b) { return a | b; }
};
struct kiln_by_all {
    static inline bool join(bool a, bool b) { return a & b; }
};

// The value of the thread whose number differs in the bits of `apart`.
template <class T> inline T kiln_partner(T x, int apart) { return (T)__shfl_xor_sync(0xffffffffu, (int)x, apart); }
inline kiln_i64 kiln_partner(kiln_i64 x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }
inline kiln_u64 kiln_partner(kiln_u64 x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }
inline float kiln_partner(float x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }
inline double kiln_partner(double x, int apart) { return __shfl_xor_sync(0xffffffffu, x, apart); }

// Waits for all threads of the own group of some warps, or of the block. A block has at most fifteen such
// groups. Their barriers are not the block's: a group whose rows are done may wait for the block while another still
// waits for itself, and a barrier that is met with two numbers of threads is an illegal instruction, or lets
// threads go too early.
template <int GROUP, bool BLOCK> inline void kiln_group_barrier()
{
    if (BLOCK) __syncthreads();
    else kiln_bar_sync(1 + threadIdx.x / GROUP, GROUP);
}

// What the GROUP threads of each group have, joined; every thread of the group gets it. Pairs are joined,
// then pairs of pairs, which gives both of a pair the same bits; then the warps are joined one after the
// other.
template <class By, int GROUP, bool BLOCK, class T> inline T kiln_joined(T x)
{
    constexpr int within = GROUP < 32 ? GROUP : 32;
    #pragma unroll
    for (int apart = within / 2; apart > 0; apart /= 2) x = By::join(x, kiln_partner(x, apart));
    if (GROUP > 32) {
        constexpr int count = GROUP > 32 ? GROUP / 32 : 1;
        // As many as a block may have.
        __shared__ T warps[32];
        const int first = threadIdx.x / GROUP * count;
        // Nobody writes these parts before everybody has read those of the reduction before.
        kiln_group_barrier<GROUP, BLOCK>();
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
        kiln_group_barrier<GROUP, BLOCK>();
        x = warps[first];
        for (int warp = 1; warp < count; warp++) x = By::join(x, warps[first + warp]);
    }
    return x;
}

// The same for groups of a block, all of one size.
template <class By, int GROUP, class T> inline T kiln_group(T x) { return kiln_joined<By, GROUP, false>(x); }

// The same for all threads of a block, whatever groups it has besides.
template <class By, int THREADS, class T> inline T kiln_block(T x) { return kiln_joined<By, THREADS, true>(x); }
