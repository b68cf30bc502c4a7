// Adds what the chunks of a depth gave, and stores the results. Of few results and many chunks, `LANES` threads add every so-many-th chunk each, and the
// first of them adds what they have, in their order.

inline void run(const R* __restrict__ parts, O* __restrict__ result)
{
    constexpr int ACROSS = THREADS / LANES;
    int across = threadIdx.x % ACROSS, lane = threadIdx.x / ACROSS;
    Index number = (Index)blockIdx.x * ACROSS + across;
    R sum = 0;
    if (number < PARTS) {
        #pragma unroll 16
        for (int chunk = lane; chunk < CHUNKS; chunk += LANES) sum += parts[chunk * (Index)PARTS + number];
    }
    if (LANES > 1) {
        __shared__ R lanes[LANES][ACROSS];
        lanes[lane][across] = sum;
        __syncthreads();
        if (lane != 0) return;
        #pragma unroll
        for (int other = 1; other < LANES; other++) sum += lanes[other][across];
    }
    if (number < PARTS) result[part_at(number)] = narrow(sum);
}
