// Adds what the chunks of a depth gave, first to last, and stores the results.

inline void run(const R* __restrict__ parts, O* __restrict__ result)
{
    Index number = (Index)blockIdx.x * THREADS + threadIdx.x;
    if (number >= PARTS) return;
    R sum = 0;
    #pragma unroll 16
    for (int chunk = 0; chunk < CHUNKS; chunk++) sum += parts[chunk * (Index)PARTS + number];
    result[part_at(number)] = narrow(sum);
}
