// Reductions over the threads of a block, in an order that depends on the number of threads alone.

struct kiln_sum {
    static float none() { return 0; }
    static float join(float a, float b) { return a + b; }
};

// The largest; NaN if there is one.
struct kiln_max {
    static float none() { return __uint_as_float(0xff800000u); }
    static float join(float a, float b) { return a > b || a != a ? a : b; }
};

// What all THREADS threads of the block have, joined; every thread gets it. In a warp lanes are joined in pairs, which
// gives both of a pair the same bits; then the warps are joined one after the other.
template <class Join, int THREADS> float kiln_block(float x)
{
    static_assert(THREADS % 32 == 0, "whole warps");
    __shared__ float warps[THREADS / 32];
    for (int apart = 16; apart; apart /= 2) x = Join::join(x, __shfl_xor_sync(0xffffffffu, x, apart));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = Join::none();
    for (int warp = 0; warp < THREADS / 32; warp++) x = Join::join(x, warps[warp]);
    // Nobody writes the next reduction's parts before everybody has read these.
    __syncthreads();
    return x;
}
